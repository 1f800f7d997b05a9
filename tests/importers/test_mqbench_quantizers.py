"""Quantizers that were written for MQBench run inside Bitwright."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import mqbench_quantizers as theirs
import pytest
import torch
from torch import Tensor, nn

import bitwright as bw
from bitwright.core.errors import FormatError
from bitwright.core.registry import QUANTIZERS
from bitwright.testing import check_quantizer

CLASSES = (theirs.OurLsq, theirs.OurPact, theirs.OurFixed)
FORMATS = {"weights": "int4/channel/sym", "activations": "uint8/tensor/asym"}


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    for cls in (*CLASSES, theirs.OurHalfStep):
        QUANTIZERS.register(cls.__name__, cls)
    yield
    for cls in (*CLASSES, theirs.OurHalfStep):
        QUANTIZERS.unregister(cls.__name__)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)).eval()


def data() -> tuple[Tensor, Tensor]:
    x = 4 * torch.randn(64, 8, generator=torch.Generator().manual_seed(0))  # beyond PACT's first range
    return x, torch.sin(0.75 * x[:, :1])


@pytest.mark.parametrize("cls", CLASSES)
def test_the_conformance_kit_accepts_them(cls: type) -> None:
    check_quantizer(cls)


def test_their_parameters_are_learned() -> None:
    assert (theirs.OurLsq.learned, theirs.OurLsq.learned_if_asymmetric) == (("scale",), ("zero_point",))
    assert (theirs.OurPact.learned, theirs.OurPact.learned_if_asymmetric) == (("alpha",), ("n_alpha",))
    assert (theirs.OurFixed.learned, theirs.OurFixed.learned_if_asymmetric) == ((), ())


@pytest.mark.parametrize("name", ["OurLsq", "OurPact"])
def test_they_are_calibrated_trained_saved_and_exported(name: str, tmp_path: Path) -> None:
    model, (x, target) = net(), data()
    quantized = bw.quantize(model, [x], backend="onnxruntime", quantizer=name, weight_quantizer="lsq", **FORMATS)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    before = {key: value.clone() for key, value in model.state_dict().items() if key.startswith("bitwright.")}
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.6 * losses[0]
    learned = "scale" if name == "OurLsq" else "alpha"
    moved = [key for key, value in model.state_dict().items() if key in before and not torch.equal(value, before[key])]
    assert f"bitwright.0:input.{learned}" in moved
    artefact = quantized.export(tmp_path / "model.onnx")
    assert quantized.check(artefact.path, [x]).passed
    quantized.save(tmp_path / "saved")
    again = bw.load(tmp_path / "saved", model=net(), inputs=(x,))
    assert torch.equal(again.model(x), model(x))


def test_lsq_computes_and_learns_as_ours() -> None:
    x, target = data()
    results = []
    for name in ("OurLsq", "lsqplus"):
        model = net()
        bw.quantize(
            model, [x], backend="academic", observer="minmax", quantizer=name, weight_quantizer="plain", **FORMATS
        )
        (model(0.9 * x) - target).square().mean().backward()  # no value at the end of the range
        results.append((model(x), model.get_parameter("bitwright.1:output.scale").grad))
    torch.testing.assert_close(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-4, atol=1e-6)


def test_levels_between_those_of_the_scale_are_found() -> None:
    x, _ = data()
    with pytest.raises(FormatError) as caught:
        bw.quantize(net(), [x], quantizer="OurHalfStep", weight_quantizer="plain")
    assert caught.value.codes == ["not-on-the-grid"]


def test_options_reach_the_class() -> None:
    x, _ = data()
    model = net()
    plan = bw.make_plan(bw.capture(model, x), "academic")
    spec = replace(plan.sites["0:input"], quantizer="OurPact", quantizer_options={"alpha": 0.5})
    quantized = bw.quantize(model, [x], plan=replace(plan, sites={**plan.sites, "0:input": spec}))
    highest = float(bw.quantizers_of(quantized.model)["0:input"](torch.tensor([9.0])).detach())
    assert highest == pytest.approx(0.5, rel=0.01)
    wrong = replace(spec, quantizer_options={"alfa": 0.5})
    with pytest.raises(bw.BitwrightError):
        bw.quantize(net(), [x], plan=replace(plan, sites={**plan.sites, "0:input": wrong}))
