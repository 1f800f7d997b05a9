"""Quantizers that give a weight another size, where a norm is folded into it: nothing else keeps that size."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import bitwright as bw
from bitwright.core.formats import Format
from bitwright.plan import FoldSpec, Plan, SiteSpec
from bitwright.ptq import calibrate
from bitwright.quantizers import Quantizer, prepare, quantizers_of

STRATEGIES = [0, 1, 2, 3, 4]
FORMATS = [f"int{bits}/{rest}" for bits in (8, 4) for rest in ("channel/sym", "tensor/sym", "tensor/sym/pot")]
RESCALING = ["dorefa", "qil", "apot"]


def build(name: str, format: str, strategy: int = 4, guard: str | None = None) -> tuple[nn.Sequential, Tensor]:
    """A convolution and a norm that are as after training; γ and σ differ from channel to channel."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3, bias=False), nn.BatchNorm2d(8))
    x = torch.randn(32, 4, 8, 8) * 3
    nn.init.uniform_(model[1].weight, 0.3, 3.0)
    model[1].momentum = 1.0
    model.train()(x)
    model[1].momentum = 0.1
    site = SiteSpec(format=Format.parse(format), quantizer=name, guard=guard)
    prepare(model, Plan(sites={"0:weight": site}, fold={"1": FoldSpec(into="0", strategy=strategy)}), inputs=x)
    calibrate(model.eval(), [x])
    return model, x


def deployed(model: nn.Sequential) -> tuple[Tensor, Tensor, Quantizer]:
    """The folded weight before and after its quantizer."""
    quantizer = quantizers_of(model)["0:weight"]
    assert quantizer.fold is not None
    folded = (model[0].weight * quantizer.fold.unit()[:, None, None, None]).detach()
    return folded, quantizer(folded).detach(), quantizer


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", RESCALING)
def test_statistics_of_training_are_those_of_deployment(name: str, format: str) -> None:
    model, x = build(name, format)
    before = model[1].running_var.clone()
    model.train()
    with torch.no_grad():
        for _ in range(100):
            in_training = model(x)
        assert (model[1].running_var / before).log().abs().max() < 1.5  # 10²³ and more, if Q forgets sizes
        in_use = model.eval()(x)
    error = (in_use - in_training).norm() / in_training.norm()
    assert error < 0.1


@pytest.mark.parametrize("format", ["int8/channel/sym", "int4/channel/sym", "int2/channel/sym", "int8/tensor/sym"])
@pytest.mark.parametrize("name", RESCALING)
def test_rounded_rows_are_as_large_as_they_came(name: str, format: str) -> None:
    folded, rounded, quantizer = deployed(build(name, format)[0])
    rows = quantizer.layout.rows
    assert torch.allclose(rows(rounded).norm(dim=1), rows(folded).norm(dim=1), rtol=1e-4)
    unfolded = copy.deepcopy(quantizer)
    unfolded.fold = None
    assert not torch.allclose(rows(unfolded(folded)).norm(dim=1), rows(folded).norm(dim=1), rtol=0.1)  # as published


@pytest.mark.parametrize("format", [*FORMATS, "int2/channel/sym", "uint8/tensor/asym"])
@pytest.mark.parametrize("name", ["dorefa", "qil"])
def test_the_exported_grid_is_the_one_in_force(name: str, format: str) -> None:
    if name == "qil" and "asym" in format:
        pytest.skip("QIL is symmetric")
    model, x = build(name, format, guard="int16-pairs" if format == "int8/channel/sym" else None)
    for _ in range(3):
        with torch.no_grad():
            model[0].weight.mul_(1.5).add_(torch.randn_like(model[0].weight) * 0.05)
        model(x)
        folded, rounded, quantizer = deployed(model)
        grid, codes = quantizer.grid(), quantizer.integers(folded)
        steps = codes - quantizer.layout.spread(grid.zero_point, folded)
        assert torch.equal(steps * quantizer.layout.spread(grid.scale, folded), rounded)
        assert grid.qmin <= int(codes.min()) <= int(codes.max()) <= grid.qmax
        if "pot" in format:
            assert (torch.frexp(grid.scale).mantissa == 0.5).all()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", RESCALING)
def test_gradients_are_finite_also_of_a_channel_of_zeros(name: str, strategy: int) -> None:
    model, x = build(name, "int8/tensor/sym", strategy)
    with torch.no_grad():
        model[0].weight[3] = 0
    model.train()(x).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    assert model[0].weight.grad.abs().sum() > 0


@pytest.mark.parametrize("weights", ["int4/channel/sym", "int4/tensor/sym"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_artefacts_equal_the_simulation_after_training(strategy: int, weights: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)
    ).eval()
    x = torch.randn(32, 1, 8, 8)
    y = nn.functional.avg_pool2d(x, 4).flatten(1).argmax(dim=1)
    quantized = bw.quantize(model, [x], weights=weights, quantizer="pact", fold=strategy)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    model.eval()
    for runtime in ("reference", "onnxruntime"):
        artefact = quantized.export(tmp_path / "model.onnx")
        result = quantized.check(artefact.path, [x], runtime=runtime)
        assert result.passed, result
