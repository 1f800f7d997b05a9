"""Autocast, .half() and .bfloat16(): the model's numbers get smaller, the quantizers' arithmetic doesn't."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bitwright.core.formats import Format
from bitwright.plan import Plan, SiteSpec
from bitwright.ptq import calibrate
from bitwright.quantizers import prepare, quantizers_of


def spec(text: str, **options: Any) -> SiteSpec:
    return SiteSpec(format=Format.parse(text), **options)


def linear(weights: str, quantizer: str = "plain") -> nn.Sequential:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(8, 6)).eval()
    with torch.no_grad():
        model[0].weight *= torch.logspace(-4, 0, 6)[:, None]
    sites = {
        "0:weight": spec(weights, quantizer=quantizer),
        "0:input": spec("uint8/tensor/asym", quantizer=quantizer),
    }
    prepare(model, Plan(sites=sites))
    calibrate(model, [torch.randn(32, 8)])
    return model


@pytest.mark.parametrize("quantizer", ["plain", "lsq"])
@pytest.mark.parametrize("change", ["half", "bfloat16", "double", "to"])
def test_state_stays_float32(change: str, quantizer: str) -> None:
    model = linear("int8/channel/sym", quantizer)
    state = {name: (q.scale.clone(), q.zero_point.clone(), q.codes.clone()) for name, q in quantizers_of(model).items()}
    with torch.no_grad():
        quantizers_of(model)["0:weight"].scale[0] = 1e-6
        state["0:weight"][0][0] = 1e-6
    if change == "to":
        model.to("cpu", torch.float16)
    else:
        getattr(model, change)()
    assert model[0].weight.dtype != torch.float32
    for name, q in quantizers_of(model).items():
        for tensor, before in zip((q.scale, q.zero_point, q.codes), state[name], strict=True):
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor, before)
    x = torch.randn(4, 8).to(model[0].weight.dtype)
    assert model(x).dtype == model[0].weight.dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_arithmetic_of_a_low_precision_model_is_float32(dtype: torch.dtype) -> None:
    model = linear("int8/channel/sym").to(dtype)
    x = torch.randn(32, 8).to(dtype)
    weight, data = quantizers_of(model)["0:weight"], quantizers_of(model)["0:input"]
    w = torch.clamp(torch.round(model[0].weight.float() / weight.scale[:, None]), -128, 127) * weight.scale[:, None]
    z = data.zero_point
    d = (torch.clamp(torch.round(x.float() / data.scale) + z, 0, 255) - z) * data.scale
    assert torch.equal(model(x), F.linear(d.to(dtype), w.to(dtype), model[0].bias))


@pytest.mark.parametrize("weights", ["int8/channel/sym", "int4/group4/sym", "int8/tensor/sym"])
def test_autocast_changes_the_operator_not_the_quantizers(weights: str) -> None:
    model = linear(weights)
    x = torch.randn(32, 8)
    q = quantizers_of(model)
    w, d = q["0:weight"](model[0].weight), q["0:input"](x)
    scales = q["0:weight"].scale.clone()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
        assert torch.equal(q["0:weight"](model[0].weight), w)
        expected = F.linear(d, w, model[0].bias)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, expected)
    assert torch.equal(q["0:weight"].scale, scales)
    if "channel" in weights:
        assert scales.shape == (6,)
        assert scales.max() / scales.min() > 100


def test_calibration_under_autocast_gives_the_ranges_of_float32() -> None:
    model = linear("int8/channel/sym")
    x = torch.randn(32, 8)
    calibrate(model, [x])
    expected = {name: q.scale.clone() for name, q in quantizers_of(model).items()}
    assert expected
    with torch.autocast("cpu", torch.bfloat16):
        calibrate(model, [x])
    for name, q in quantizers_of(model).items():
        assert torch.equal(q.scale, expected[name])


@pytest.mark.parametrize("quantizer", ["plain", "lsq"])
def test_training_under_autocast(quantizer: str, zoo: SimpleNamespace) -> None:
    model = zoo.quantized(zoo.seeded(zoo.Residual), quantizer=quantizer).train()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(zoo.example(model))
    out.float().square().sum().backward()
    assert list(model.parameters())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == torch.float32
        assert torch.isfinite(parameter.grad).all(), name
