"""The plain quantizer and its grids against an independent NumPy implementation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from problems import raises_problem
from torch import Tensor, nn

from bitwright.core.formats import Format
from bitwright.plan import Plan, SiteSpec
from bitwright.ptq import calibrate
from bitwright.quantizers import Quantizer, prepare, quantizers_of

Array = NDArray[np.float32]
F32 = np.float32
EPS = np.finfo(np.float32).eps  # the scale of zeros


class Weighted(nn.Module):
    """A linear whose weight and input are both given."""

    def __init__(self, weight: Array) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.from_numpy(weight.copy()))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


def quantizer_of(values: Array, format: str, *, port: str = "weight", **options: Any) -> Quantizer:
    """A quantizer that a user would get: prepared on a model and calibrated with `values`."""
    torch.set_num_threads(1)
    weight = values if port == "weight" else np.ones((2, values.shape[-1]), F32)
    x = torch.from_numpy(values.copy()) if port == "input" else torch.ones(1, values.shape[-1])
    site = f"/linear#0:{port}"
    model = Weighted(weight)
    prepare(model, Plan(sites={site: SiteSpec(format=Format.parse(format), **options)}))
    calibrate(model, [x])
    return quantizers_of(model)[site]


def blocks(values: Array, format: Format) -> Array:
    """One row per scale; a linear's weight has its channels first and its groups along the last axis."""
    if format.granularity == "tensor":
        return values.reshape(1, -1)
    if format.granularity == "channel":
        return values.reshape(values.shape[0], -1)
    return values.reshape(-1, format.group)


def reference(values: Array, format: Format) -> tuple[NDArray[np.int64], Array, Array, Array]:
    """Codes, dequantized values, scales and zero points, straight from the definitions, in float32."""
    rows = blocks(values, format)
    low = np.minimum(rows.min(axis=1), F32(0))
    high = np.maximum(rows.max(axis=1), F32(0))
    bits, signed = format.bits, format.signed
    if format.adasign and (low >= 0).all():
        signed = False
    n = (-(2 ** (bits - 1)) + (1 if format.narrow and signed else 0)) if signed else 0
    p = 2 ** (bits - 1) - 1 if signed else 2**bits - 1
    if format.symmetric:
        scale = np.maximum(high / F32(p), low / F32(n)) if signed else high / F32(p)
        scale = np.where(scale == 0, EPS, scale)
        if format.pot:
            scale = np.array([2.0 ** round(math.log2(s)) for s in scale], F32)
        zero = np.zeros_like(scale)
    else:
        scale = np.where(high == low, EPS, (high - low) / F32(p - n))
        zero = np.clip(n - np.rint(low / scale), n, p).astype(F32)
    codes = np.clip(np.rint(rows / scale[:, None]) + zero[:, None], n, p)
    dequantized = ((codes - zero[:, None]) * scale[:, None]).astype(F32)
    return codes.astype(np.int64).reshape(values.shape), dequantized.reshape(values.shape), scale, zero


def formats() -> st.SearchStrategy[Format]:
    def build(bits: int, grain: str, kind: str) -> Format:
        return Format.parse(f"{kind.replace('B', str(bits), 1).replace('G', grain)}")

    kinds = [
        "intB/G/sym",
        "intB/G/sym/narrow",
        "intB/G/sym/pot",
        "intB/G/sym/pot/narrow",
        "intB/G/sym/adasign",
        "intB/G/asym",
        "uintB/G/asym",
    ]
    return st.builds(
        build,
        st.integers(2, 16),
        st.sampled_from(["tensor", "channel", "group2", "group4"]),
        st.sampled_from(kinds),
    )


def arrays(low: float = -1000.0, high: float = 1000.0) -> st.SearchStrategy[Array]:
    shape = st.tuples(st.integers(1, 4), st.sampled_from([4, 8, 12]))
    floats = st.floats(low, high, width=32, allow_subnormal=False)
    # numbers whose scales float32 can't represent are refused, see test_magnitudes.py
    return hnp.arrays(np.float32, shape, elements=floats.map(lambda x: x if abs(x) > 1e-30 else 0.0))


@settings(max_examples=150)
@given(values=arrays(), format=formats())
def test_codes_and_values_are_bit_equal_to_numpy(values: Array, format: Format) -> None:
    codes, dequantized, scale, zero = reference(values, format)
    quantizer = quantizer_of(values, str(format))
    x = torch.from_numpy(values)
    assert np.array_equal(quantizer.scale.numpy().ravel(), scale)
    assert np.array_equal(quantizer.zero_point.numpy().ravel(), zero)
    assert np.array_equal(quantizer.integers(x).numpy(), codes)
    assert np.array_equal(quantizer(x).numpy(), dequantized)


@settings(max_examples=60)
@given(values=arrays(low=0.0), bits=st.integers(2, 16), grain=st.sampled_from(["tensor", "channel"]))
def test_unsigned_symmetric_is_bit_equal_to_numpy(values: Array, bits: int, grain: str) -> None:
    format = Format.parse(f"uint{bits}/{grain}/sym")
    codes, dequantized, _, _ = reference(values, format)
    quantizer = quantizer_of(values, str(format))
    x = torch.from_numpy(values)
    assert np.array_equal(quantizer.integers(x).numpy(), codes)
    assert np.array_equal(quantizer(x).numpy(), dequantized)


def test_unsigned_symmetric_has_no_codes_for_negative_numbers() -> None:
    for observer in ("minmax", "mse", "percentile"):
        with raises_problem("negative-numbers", where="/linear#0:weight", mentions="uint8/tensor/sym"):
            quantizer_of(np.array([[-1.0, 2.0]], F32), "uint8/tensor/sym", observer=observer)


@settings(max_examples=60)
@given(values=arrays(), other=arrays(), format=formats())
def test_values_outside_the_range_are_clipped(values: Array, other: Array, format: Format) -> None:
    if format.granularity != "tensor":
        other = np.resize(other, values.shape)
    quantizer = quantizer_of(values, str(format))
    codes = quantizer.integers(torch.from_numpy(other * F32(50)))
    assert codes.min() >= quantizer.qmin
    assert codes.max() <= quantizer.qmax


@settings(max_examples=60)
@given(values=arrays(), format=formats(), learned=st.booleans())
def test_quantizing_twice_changes_nothing(values: Array, format: Format, learned: bool) -> None:
    quantizer = quantizer_of(values, str(format), quantizer="lsq" if learned else "plain")
    once = quantizer(torch.from_numpy(values))
    assert torch.equal(quantizer(once), once)


@settings(max_examples=40)
@given(values=arrays(), bits=st.integers(2, 16))
def test_power_of_two_scales_are_exact(values: Array, bits: int) -> None:
    scale = quantizer_of(values, f"int{bits}/channel/sym/pot").scale
    mantissa, _ = np.frexp(scale.numpy())
    assert (mantissa == 0.5).all()


def test_half_rounds_to_even() -> None:
    quantizer = quantizer_of(np.array([[-127.0, 127.0]], F32), "int8/tensor/sym/narrow")
    x = torch.tensor([[-2.5, -1.5, -0.5, 0.5, 1.5, 2.5]])
    assert quantizer(x).tolist() == [[-2.0, -2.0, 0.0, 0.0, 2.0, 2.0]]


@pytest.mark.parametrize("format", ["int4/tensor/sym/adasign", "int4/tensor/asym", "uint4/tensor/asym"])
def test_an_input_that_is_never_negative_uses_all_codes(format: str) -> None:
    values = np.linspace(0, 3, 64, dtype=F32).reshape(1, 64)
    quantizer = quantizer_of(values, format, port="input")
    assert quantizer.integers(torch.from_numpy(values)).unique().numel() == 16
    assert quantizer.format.bits == 4
    signed = quantizer_of(-values, format, port="input")
    assert signed.integers(torch.from_numpy(-values)).unique().numel() >= 8


def test_adasign_stays_signed_for_one_negative_number() -> None:
    quantizer = quantizer_of(np.array([[-0.5, 3.0]], F32), "int8/tensor/sym/adasign", port="input")
    assert (quantizer.qmin, quantizer.qmax, str(quantizer.format)) == (-128, 127, "int8/tensor/sym/adasign")
    positive = quantizer_of(np.array([[0.5, 3.0]], F32), "int8/tensor/sym/adasign", port="input")
    assert (positive.qmin, positive.qmax, positive.format.name) == (0, 255, "uint8")


@settings(max_examples=60)
@given(values=arrays(), format=formats(), seed=st.integers(0, 9))
def test_gradient_passes_exactly_where_nothing_is_clipped(values: Array, format: Format, seed: int) -> None:
    quantizer = quantizer_of(values, str(format))
    generator = np.random.default_rng(seed)
    x = torch.from_numpy((values * generator.uniform(0, 3, values.shape)).astype(F32)).requires_grad_()
    upstream = torch.from_numpy(generator.normal(size=values.shape).astype(F32))
    quantizer(x).backward(upstream)
    scale = quantizer.layout.spread(quantizer.scale, x)
    free = torch.round(x.detach() / scale) + quantizer.layout.spread(quantizer.zero_point, x)
    inside = (free >= quantizer.qmin) & (free <= quantizer.qmax)
    assert x.grad is not None
    assert torch.equal(x.grad, torch.where(inside, upstream, torch.zeros(())))


@pytest.mark.parametrize("value", [0.0, 1e-30])
def test_an_empty_tensor_has_a_valid_scale(value: float) -> None:
    for format in ("int8/channel/sym", "uint8/tensor/asym", "int4/group2/sym", "int8/tensor/sym/pot"):
        quantizer = quantizer_of(np.full((2, 4), value, F32), format)
        assert (quantizer.scale > 0).all()
        assert torch.equal(quantizer(torch.zeros(2, 4)), torch.zeros(2, 4))


def test_zero_is_always_exact() -> None:
    values = np.array([[3.1, 7.7, 5.3, 4.4]], F32)
    for format in ("uint8/tensor/asym", "int3/tensor/asym", "int8/tensor/sym"):
        for sign in (1, -1):
            assert quantizer_of(values * F32(sign), format)(torch.zeros(1, 4)).abs().max() == 0


def test_invalid_formats_suggest_valid_ones() -> None:
    with raises_problem("invalid-format", mentions="adasign"):
        Format.parse("uint8/tensor/sym/adasign")
    with raises_problem("invalid-format", mentions="2 to 16"):
        Format.parse("int17/tensor/sym")
