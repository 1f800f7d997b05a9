"""Scales follow the data over the whole range of float32; what has no scale is an error that names the site."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from single_site import Build, build_quantizer
from torch import Tensor, nn

import bitwright as bw
from bitwright.core.errors import BitwrightError, CalibrationError, PlanError
from bitwright.core.formats import Format
from bitwright.core.registry import OBSERVERS
from bitwright.kernels.codes import encode, encode_rows
from bitwright.quantizers import grid_from_range, quantizers_of
from bitwright.quantizers.grid import SMALLEST, power_of_two

CASES = [
    *(("plain", format) for format in ("int8/channel/sym", "uint8/tensor/asym", "int4/group4/asym")),
    ("plain", "int4/tensor/sym/pot"),
    *(("lsq", format) for format in ("int8/channel/sym", "uint8/tensor/asym", "int8/tensor/sym/pot")),
    ("lsqplus", "uint8/tensor/asym"),
    ("tqt", "int8/tensor/sym"),
    ("dsq", "int4/channel/sym"),
    ("minifloat", "fp8e4m3"),
    ("minifloat", "mxfp4e2m1"),
]


def numbers(seed: int, rows: int = 4, columns: int = 32) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=80, deadline=None)
@given(
    case=st.sampled_from(CASES),
    power=st.integers(-37, 37),
    seed=st.integers(0, 1 << 20),
    observer=st.sampled_from(sorted(OBSERVERS.names())),
    weight=st.booleans(),
)
def test_quantization_commutes_with_powers_of_two(
    case: tuple[str, str], power: int, seed: int, observer: str, weight: bool
) -> None:
    """q(2^k·x) = 2^k·q(x) to the last bit, for data of magnitude 10^-37 to 10^37, unless it is refused."""
    quantizer, format = case
    x = numbers(seed)
    factor = 2.0 ** round(power * 3.3219280948873626)
    plain = build_quantizer(quantizer, format, x, weight=weight, observer=observer)(x).detach()
    refused: CalibrationError | None = None
    try:
        scaled = build_quantizer(quantizer, format, x * factor, weight=weight, observer=observer)(x * factor).detach()
    except CalibrationError as error:
        refused = error
    if refused is None:
        assert torch.equal(scaled, plain * factor)
    else:
        assert refused.codes[0] in ("scale-underflow", "scale-overflow")
        assert refused.problems[0].where == f"test:{'weight' if weight else 'input'}"
        assert abs(power) > 34


@pytest.mark.parametrize("quantizer", ["dorefa", "apot", "qil"])
def test_small_weights_are_standardized_like_others(build: Build, quantizer: str) -> None:
    x = numbers(0) * 0.01
    wanted = build(quantizer, "int4/channel/sym", x, weight=True)(x)
    small = x * 2.0**-60
    assert torch.allclose(build(quantizer, "int4/channel/sym", small, weight=True)(small), wanted, atol=1e-4)


@pytest.mark.parametrize("format", ["int8/channel/sym", "int8/channel/asym", "int8/channel/sym/pot", "fp8e4m3/channel"])
@pytest.mark.parametrize(("size", "code"), [(1e-38, "scale-underflow"), (3.4e38, "scale-overflow")])
def test_numbers_without_a_scale_are_refused_with_their_site(build: Build, format: str, size: float, code: str) -> None:
    quantizer = "minifloat" if format.startswith("fp8") else "plain"
    x = torch.tensor([[size, -size], [-size, size]])
    if quantizer == "minifloat" and code == "scale-overflow":
        assert build(quantizer, format, x, weight=True)(x).isfinite().all()
        return
    with pytest.raises(CalibrationError) as caught:
        build(quantizer, format, x, weight=True)
    assert caught.value.codes == [code]
    assert caught.value.problems[0].where == "test:weight"


def test_a_channel_that_training_has_switched_off_is_no_error(build: Build) -> None:
    x = numbers(0)
    x[1] *= 1e-40
    out = build("plain", "int8/channel/sym", x, weight=True)(x)
    assert out[1].abs().max() <= 1e-38
    assert torch.allclose(out[[0, 2, 3]], x[[0, 2, 3]], atol=0.02)


def test_zeros_have_a_scale() -> None:
    for format in ("int8/channel/sym", "uint8/channel/asym", "int8/channel/sym/pot"):
        grid = grid_from_range(torch.zeros(3), torch.tensor([0.0, 1.0, 1e-30]), Format.parse(format), site="here")
        assert (grid.scale >= SMALLEST).all()
        assert grid.scale[2] < 1e-31


def test_powers_of_two_are_exact_at_every_exponent() -> None:
    every = torch.tensor([2.0**k for k in range(-126, 127)])
    assert torch.equal(power_of_two(every), every)
    assert torch.equal(power_of_two(every * 1.4142134), every)
    assert torch.equal(power_of_two(every * 1.4142137), every * 2)


@pytest.mark.parametrize("name", ["lsq", "tqt", "pact"])
def test_a_learned_scale_never_leaves_float32(build: Build, name: str) -> None:
    x = numbers(0)
    quantizer = build(name, "int8/tensor/sym", x)
    for value in (0.0, -500.0, 500.0, 1e-45):
        with torch.no_grad():
            for parameter in quantizer.parameters():
                parameter.fill_(value)
        assert SMALLEST <= float(quantizer.grid().scale) < float("inf")
        assert not quantizer(x).isnan().any()


def test_low_precision_training_keeps_small_rows() -> None:
    x = torch.stack([numbers(0)[0], numbers(1)[0] * 1e-34, torch.zeros(32)])
    for codes in (encode(x), encode(x, seed=3), encode_rows(x, 127)):
        found = codes.float()
        assert ((found - x).abs() <= x.abs().amax(1, keepdim=True) / 100).all()


class Net(nn.Module):
    def __init__(self, size: float, *, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 8, 3, bias=bias)
        self.second = nn.Conv2d(8, 8, 3, bias=bias)
        self.head = nn.Linear(8, 4, bias=bias)
        if bias:
            with torch.no_grad():
                for layer in (self.first, self.second, self.head):
                    layer.bias.mul_(size)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.relu(self.second(torch.relu(self.first(x)))).mean((2, 3)))
        return logits


def quantized(size: float, *, bias: bool, **choices: Any) -> tuple[bw.Quantized, list[Tensor], Tensor]:
    model = Net(size, bias=bias)
    data = [torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) * size for seed in range(2)]
    exact = model(data[0]).detach()
    return bw.quantize(model, data, **choices), data, exact


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("size", [2.0**-106, 2.0**-24, 2.0**110])
def test_runtimes_agree_at_any_magnitude(size: float, backend: str, tmp_path: Path) -> None:
    if backend == "openvino":
        pytest.importorskip("openvino")
    found, data, exact = quantized(size, bias=True, backend=backend)
    out = found.model(data[0]).detach()
    assert (out / size - exact / size).norm() < 0.01 * (exact / size).norm()
    found.export(tmp_path / "model.onnx")
    assert bw.check(found.model, tmp_path / "model.onnx", data, runtime=backend).passed


def test_products_of_scales_that_runtimes_cannot_form_are_refused(tmp_path: Path) -> None:
    found, _, _ = quantized(1e-34, bias=False)
    with pytest.raises(BitwrightError) as caught:
        found.export(tmp_path / "model.onnx")
    assert set(caught.value.codes) == {"scale-underflow"}
    assert {problem.where for problem in caught.value.problems} == {"first:weight", "second:weight", "head:weight"}
    assert not list(tmp_path.iterdir())
    with pytest.raises(PlanError) as caught:
        quantized(1e-34, bias=True)
    assert set(caught.value.codes) == {"scale-underflow"}
    assert {problem.where for problem in caught.value.problems} >= {"second:bias", "head:bias"}


def test_a_dead_channel_with_a_bias_is_no_error() -> None:
    model = Net(1.0, bias=True)
    with torch.no_grad():
        model.second.weight[3].mul_(1e-41)
        model.second.weight[4].mul_(1e-37)
        model.second.bias[3:5] = 0.0
    data = [torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))]
    exact = model(data[0]).detach()
    found = bw.quantize(model, data)
    assert (found.model(data[0]) - exact).norm() < 0.02 * exact.norm()
    assert all(q.grid().scale.isfinite().all() for q in quantizers_of(found.model).values())
