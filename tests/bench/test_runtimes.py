"""One model on all runtimes: measured alike, the pick is a sound one, and what can't run says why."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import bitwright as bw
from bitwright.deploy.runtime_onnxruntime import OnnxRuntime
from bitwright.errors import BitwrightError
from bitwright.registry import RUNTIMES
from bitwright.report import Comparison

BOTH = ["onnxruntime", "openvino"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 8, 3, padding=1)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.conv(x)).mean((2, 3)))


@pytest.fixture
def workload() -> bw.Workload:
    torch.manual_seed(0)
    model, images = Net().eval(), torch.randn(32, 2, 6, 6)
    with torch.no_grad():
        target = model(images).argmax(1)
    return bw.Workload(
        name="tiny",
        model=model,
        inputs=(images[:2],),
        calibration=lambda: images.split(8),
        evaluation=lambda: zip(images.split(16), target.split(16), strict=True),
    )


def test_every_runtime_is_measured_beside_its_float_model(workload: bw.Workload) -> None:
    before = {key: value.clone() for key, value in workload.model.state_dict().items()}
    phases: list[str] = []
    result = bw.compare_runtimes(workload, BOTH, batch_sizes=(1, 4), runs=5, progress=phases.append)
    assert [row.runtime for row in result.runtimes] == BOTH
    for row in result.runtimes:
        assert row.backend == row.runtime
        assert row.parity.passed
        assert row.executed == {"int8": 2, "float": 0}
        assert {a.where: a.value for a in row.accuracies}["float"] == 100.0
        assert [(t.batch, t.variant, t.runs, t.threads) for t in row.timings] == [
            (batch, variant, 5, 1) for batch in (1, 4) for variant in ("float", "quantized")
        ]
    medians = {(t.batch, t.runtime, t.variant): t.median_ms for row in result.runtimes for t in row.timings}
    for pick in result.fastest:
        assert pick.median_ms == min(ms for (batch, _, _), ms in medians.items() if batch == pick.batch)
        assert medians[pick.batch, pick.runtime, pick.variant] == pick.median_ms
    assert Comparison.model_validate_json(result.model_dump_json()) == result
    assert "timing batch 4: 5 of 5" in phases
    after = workload.model.state_dict()
    assert set(after) == set(before)
    assert all(torch.equal(before[key], after[key]) for key in before)


class Absent(OnnxRuntime):
    name = "absent"

    @staticmethod
    def missing() -> str | None:
        return "the package absent is not installed"


class Wrong(OnnxRuntime):
    """Fast and wrong."""

    name = "wrong"

    def run(self, feed):
        return [array * 3 - 1 for array in super().run(feed)]


@pytest.fixture
def others() -> Iterator[None]:
    kinds = {"absent": Absent, "wrong": Wrong}
    for name, kind in kinds.items():
        RUNTIMES.register(name, kind)
    yield
    for name in kinds:
        RUNTIMES.unregister(name)


@pytest.mark.usefixtures("others")
def test_what_is_missing_says_why_and_what_is_wrong_is_no_pick(workload: bw.Workload) -> None:
    result = bw.compare_runtimes(workload, ["absent", "wrong"], runs=2, evaluate=False)
    assert [(skip.runtime, skip.why) for skip in result.skipped] == [("absent", "the package absent is not installed")]
    assert [row.parity.passed for row in result.runtimes] == [False]
    assert [pick.variant for pick in result.fastest] == ["float"]
    assert result.runtimes[0].accuracies == ()


def test_unknown_runtimes_are_an_error(workload: bw.Workload) -> None:
    with pytest.raises(BitwrightError, match="onnxruntime"):
        bw.compare_runtimes(workload, ["onnxruntim"])
