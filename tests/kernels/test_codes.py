from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bitwright.kernels.codes import EXACT, FULL, TINY, Signed, encode, encode_columns, encode_rows, signed_bytes

arrays = hnp.arrays(np.float32, hnp.array_shapes(max_dims=3, max_side=20), elements=st.floats(-1e4, 1e4, width=32))


@given(arrays, st.booleans(), st.booleans())
@settings(max_examples=60)
def test_nearest_codes_are_numpys(array: np.ndarray, signed: bool, whole: bool) -> None:
    codes = encode(torch.from_numpy(array), signed=signed, whole=whole)
    zero = 0 if array.min() >= 0 and not signed else 128
    assert codes.zero == zero
    largest = np.abs(array).reshape(1 if whole else len(array), -1).max(1)
    scales = codes.scales.numpy()
    assert scales[largest > 1e-20] == pytest.approx(largest[largest > 1e-20] / (127 if zero else 255), rel=1e-6)
    steps = scales.reshape(-1, *(1,) * (array.ndim - 1))
    expected = np.clip(np.rint(array * (np.float32(1.0) / steps) + np.float32(zero)), 0, 255)
    assert codes.values.numpy() == pytest.approx(expected)
    assert (np.abs(codes.float().numpy() - array) <= steps * 0.5001 + 1e-6 * np.abs(array)).all()


@pytest.mark.parametrize("size", [1000, 200_000])  # uncompiled, compiled
def test_stochastic_rounding_is_unbiased_with_the_right_variance(size: int) -> None:
    """Over uniform numbers: bias below 0.01 s, and the mean variance s²/6 within 5 %."""
    x = torch.rand(size, generator=torch.Generator().manual_seed(0)) * 2 - 1
    repeats = 400 if size == 1000 else 8
    x = x.view(10, -1)
    errors = torch.stack([(encode(x, seed).float() - x) / encode(x).steps for seed in range(repeats)])
    assert abs(float(errors.mean())) < 0.01
    assert float(errors.square().mean()) == pytest.approx(1 / 6, rel=0.05)
    if repeats > 100:
        assert float(errors.mean(0).abs().mean()) < 3 / repeats**0.5 * 0.41  # each number by itself


def test_noise_differs_by_seed_and_place_and_repeats_for_a_seed() -> None:
    x = torch.full((4096,), 0.5)
    x[0] = 100.0
    one = encode(x, 1, whole=True)
    assert torch.equal(one.values, encode(x, 1, whole=True).values)
    assert not torch.equal(one.values, encode(x, 2, whole=True).values)
    assert len(one.values[1:].unique()) == 2


@given(arrays.filter(lambda a: a.ndim >= 2))
@settings(max_examples=40)
def test_rows_have_scales_of_their_own(array: np.ndarray) -> None:
    signed = encode_rows(torch.from_numpy(array), 63)
    assert int(signed.values.abs().max()) <= 63
    step = signed.scales.numpy().reshape(-1, *(1,) * (array.ndim - 1))
    assert (np.abs(signed.float().numpy() - array) <= step * 0.501 + 1e-6 * np.abs(array)).all()


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("size", [(20, 30), (400, 300)])  # uncompiled, compiled
def test_columns_are_rows_of_the_transpose(size: tuple[int, int], whole: bool) -> None:
    x = torch.randn(*size, generator=torch.Generator().manual_seed(0))
    columns, rows = encode_columns(x, 63, whole=whole), encode_rows(x.t().contiguous(), 63, whole=whole)
    assert torch.equal(columns.values, rows.values)
    assert torch.equal(columns.scales, rows.scales)


@pytest.mark.parametrize("limit", [FULL, EXACT])
def test_a_second_operand_is_unbiased_number_by_number(limit: int) -> None:
    """Within the limit at once: codes that are halved afterwards would be off by up to half a step in the mean."""
    x, repeats = torch.linspace(-1, 1, 401).view(1, -1), 2000
    total = torch.zeros_like(x)
    for seed in range(repeats):
        codes = encode(x, seed * 7919 + 13, signed=True, limit=limit, whole=True)
        second = Signed(signed_bytes(codes.values), codes.scales)
        assert int(second.values.abs().max()) <= limit
        total += second.float()
    bias = (total / repeats - x) / codes.scales
    assert float(codes.scales) == pytest.approx(1 / limit)
    assert abs(float(bias.mean())) < 0.01
    assert float(bias.abs().max()) < 5 * 0.5 / repeats**0.5


@pytest.mark.parametrize("size", [20, 200_000])  # uncompiled, compiled
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_rows_that_arent_finite_are_seen_and_others_are_as_ever(value: float, size: int) -> None:
    x = torch.randn(3, size, generator=torch.Generator().manual_seed(0))
    clean = encode(x).float()
    x[1, 7] = value
    for seed in (None, 5):
        found = encode(x, seed).float()
        assert found[1].isnan().all()
        assert found[[0, 2]].isfinite().all()
    assert torch.equal(encode(x).float()[[0, 2]], clean[[0, 2]])
    assert encode_rows(x, FULL).float().isnan().all(1).tolist() == [False, True, False]
    assert encode(x, whole=True).float().isnan().all()


def test_zeros_and_tiny_numbers_have_tiny_scales() -> None:
    x = torch.tensor([[0.0, 0.0], [1e-40, 0.0], [1.0, -1.0]])
    assert encode(x).scales[:2].max() <= TINY
    assert torch.equal(encode(x).float()[:2], torch.zeros(2, 2))
    assert torch.equal(encode_rows(x, FULL).float()[:2], torch.zeros(2, 2))


def test_one_scale_for_all_rows() -> None:
    x = torch.tensor([[1.0, -2.0], [0.01, 12.7]])
    assert encode_rows(x, FULL, whole=True).scales.tolist() == pytest.approx([0.1, 0.1])
    assert encode(x, whole=True).scales.tolist() == pytest.approx([0.1])
