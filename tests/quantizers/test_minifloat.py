"""FP8 and MX: the numbers of the published formats."""

from __future__ import annotations

import copy

import pytest
import torch
from problems import raises_problem
from torch import nn

import bitwright as bw
from bitwright.core.errors import FormatError

X = torch.randn(20_000, generator=torch.Generator().manual_seed(0)) * torch.exp2(torch.arange(20_000) % 24 - 16.0)


def rounded(format: str, x: torch.Tensor) -> torch.Tensor:
    """`x` as a linear's input is rounded; the range is that of `x` itself."""
    model = nn.Linear(x.shape[-1], 1)
    plan = bw.Plan.from_yaml(f"bitwright: 1\nsites:\n  /linear#0:input: {{format: {format}, quantizer: minifloat}}\n")
    bw.prepare(model, plan)
    bw.calibrate(model, [x])
    return bw.quantizers_of(model)["/linear#0:input"](x).detach()


@pytest.mark.parametrize(
    ("format", "dtype", "largest"),
    [("fp8e4m3", torch.float8_e4m3fn, 448.0), ("fp8e5m2", torch.float8_e5m2, 57344.0)],
)
def test_fp8_is_torchs_own(format: str, dtype: torch.dtype, largest: float) -> None:
    x = X.reshape(-1, 32)
    scale = x.abs().max() / largest
    assert torch.allclose(rounded(format, x), (x / scale).to(dtype).float() * scale, rtol=1e-6, atol=0)


def test_mxfp4_has_the_published_numbers() -> None:
    block = torch.tensor([0.0, 0.2, 0.3, 0.9, 1.2, 1.3, 2.4, 2.6, 3.4, 3.6, 4.9, 5.1, 6.0, -7.0, -0.7, -5.0] * 2)
    expected = [0.0, 0.0, 0.5, 1.0, 1.0, 1.5, 2.0, 3.0, 3.0, 4.0, 4.0, 6.0, 6.0, -6.0, -0.5, -4.0]
    assert rounded("mxfp4e2m1", block[None])[0].tolist() == pytest.approx(expected * 2)  # ties to even: −0.7, −5


@pytest.mark.parametrize(("format", "exponent"), [("mxint8", 0), ("mxfp8e4m3", 8), ("mxfp8e5m2", 15), ("mxfp4e2m1", 2)])
def test_blocks_of_32_have_powers_of_two(format: str, exponent: int) -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    y = rounded(format, x)
    assert torch.equal(rounded(format, 8 * x), 8 * y)  # the shared exponent takes it all
    changed = x.clone()
    changed[:, 32:] *= 1000  # another block's business
    assert torch.equal(rounded(format, changed)[:, :32], y[:, :32])
    if format == "mxint8":
        scale = torch.exp2(torch.floor(torch.log2(x.reshape(4, 2, 32).abs().amax(2, keepdim=True))) - 6)
        codes = torch.clamp(torch.round(x.reshape(4, 2, 32) / scale), -127, 127)
        assert torch.equal(y, (codes * scale).reshape(4, 64))


@pytest.mark.parametrize("text", ["mxint8/tensor", "fp8e4m3/asym", "fp8e4m3/tensor/channel", "mxfp4e3m0"])
def test_unknown_float_formats_are_rejected(text: str) -> None:
    with pytest.raises(FormatError):
        bw.Format.parse(text)


def test_a_plan_of_small_floats_is_made_and_kept() -> None:
    torch.manual_seed(0)
    exact = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)).eval()
    x, errors = torch.randn(64, 32), {}
    for weights in ("mxfp4e2m1", "mxfp8e4m3", "fp8e4m3/channel"):
        model = copy.deepcopy(exact)
        quantized = bw.quantize(model, [x], backend="academic", weights=weights, activations="fp8e4m3")
        assert bw.Plan.from_yaml(quantized.plan.to_yaml()) == quantized.plan
        assert {spec.quantizer for _, spec in quantized.plan.quantized} == {"minifloat"}
        errors[weights] = float((model(x) - exact(x)).detach().square().mean())
    assert 0 < errors["mxfp8e4m3"] < errors["mxfp4e2m1"]
    assert 0 < errors["fp8e4m3/channel"] < errors["mxfp4e2m1"]


def test_unexportable_formats_are_rejected_before_calibration() -> None:
    model = nn.Sequential(nn.Linear(32, 4)).eval()
    with raises_problem("unsupported-levels", where="0:weight", mentions="minifloat"):
        bw.quantize(model, [torch.randn(2, 32)], backend="academic", weights="fp8e4m3", artefact=True)
    with raises_problem("unsupported-format", where="plan", mentions="onnxruntime"):
        bw.quantize(model, [torch.randn(2, 32)], weights="fp8e4m3")
    plan = bw.Plan.from_yaml("bitwright: 1\nsites:\n  0:weight: {format: int8/tensor/sym, quantizer: minifloat}\n")
    with raises_problem("unsupported-format", where="0:weight", mentions="fp8e4m3"):
        bw.prepare(model, plan)
