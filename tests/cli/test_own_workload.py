"""What a user's own file may say, and how mistakes in it are told."""

from __future__ import annotations

from pathlib import Path

import pytest

OWN = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
from bitwright import Workload

torch.manual_seed(0)
x = torch.randn(64, 16)
y = torch.randint(0, 4, (64,))


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.head = nn.Linear(16, 32), nn.Linear(4, 32), nn.Linear(32, 4)

    def forward(self, a, b):
        h = torch.relu(self.left(a) + self.right(b))
        return {"digit": self.head(h), "hidden": h}


def two():
    def evaluate(model):
        out = model(x, x[:, :4])
        return {"digit_acc": 100 * float((out["digit"].argmax(1) == y).float().mean()), "hidden": float(out["hidden"].mean())}

    return Workload(
        name="two", model=Two().eval(), inputs=(x[:2], x[:2, :4]), metric="digit_acc", evaluate=evaluate,
        calibration=lambda: [(x, x[:, :4])],
    )
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("own") / "own.py"
    file.write_text(OWN)
    return file


def test_a_metric_sees_the_model_s_own_dict_on_the_runtime_too(run, own: Path, tmp_path: Path) -> None:
    ran = run("quantize", f"{own}:two", "-o", tmp_path / "out", "--json")
    assert ran.code == 0, ran.err
    rows = {row["where"]: row["value"] for row in ran.json["report"]["accuracies"]}
    assert rows["onnxruntime"] == pytest.approx(rows["simulated"], abs=2)
