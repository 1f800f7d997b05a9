"""The small networks of grids."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import bitwright as bw
from bitwright.core.environment import DATA_VARIABLE
from bitwright.zoo.networks import DepthwiseNet, ResidualNet
from bitwright.zoo.workloads import TESTED_ON, TRAINED_ON

NAMES = ("residual-fashion-mnist", "depthwise-fashion-mnist", "residual-cifar10", "depthwise-cifar10")


def test_networks_have_their_operators() -> None:
    residual = bw.capture(ResidualNet().eval(), torch.randn(2, 1, 14, 14))
    assert [op.kind for op in residual.ops].count("add") == 2
    depthwise = bw.capture(DepthwiseNet().eval(), torch.randn(2, 3, 16, 16))
    assert sum(m.groups > 1 for m in DepthwiseNet().modules() if isinstance(m, torch.nn.Conv2d)) == 2
    assert [op.kind for op in depthwise.ops].count("add") == 1
    assert "relu6" in {op.kind for op in depthwise.ops}


@pytest.mark.realdata
@pytest.mark.parametrize("name", NAMES)
def test_data_has_the_documented_sizes(name: str, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DATA_VARIABLE, str(data_dir))
    work = bw.load_workload(name)
    side = 14 if "fashion" in name else 16
    assert work.name == name
    assert work.inputs[0].shape[-2:] == (side, side)  # type: ignore[index]
    assert work.training is not None
    assert len(work.training()) == TRAINED_ON
    assert bw.evaluate(work, work.model.eval())["n"] == TESTED_ON
