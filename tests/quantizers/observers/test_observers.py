"""Each observer against an independent NumPy implementation, per tensor and per row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from bitwright.core.errors import BitwrightError
from bitwright.core.formats import Format
from bitwright.core.registry import OBSERVERS

Array = NDArray[np.float32]
F32 = np.float32
ALL = ["minmax", "ema-minmax", "percentile", "mse", "kl"]


def seen_range(name: str, batches: list[Array], format: str = "int8/tensor/sym", **options: Any) -> tuple[Array, Array]:
    torch.set_num_threads(1)
    observer = OBSERVERS.get(name)(format=Format.parse(format), **options)
    for batch in batches:
        observer.observe(torch.from_numpy(batch.copy()))
    low, high = observer.range()
    assert low.dtype == high.dtype == torch.float32
    return low.numpy(), high.numpy()


def rows(max_rows: int = 3, length: int = 24, low: float = -100.0) -> st.SearchStrategy[Array]:
    shape = st.tuples(st.integers(1, max_rows), st.integers(1, length))
    return hnp.arrays(np.float32, shape, elements=st.floats(low, 100.0, width=32, allow_subnormal=False))


def streams() -> st.SearchStrategy[list[Array]]:
    """Several batches with the same rows and any lengths."""
    return st.integers(1, 3).flatmap(
        lambda count: st.lists(
            st.integers(1, 12).flatmap(
                lambda length: hnp.arrays(
                    np.float32,
                    (count, length),
                    elements=st.floats(-100, 100, width=32, allow_subnormal=False),
                )
            ),
            min_size=1,
            max_size=5,
        )
    )


@given(stream=streams())
def test_minmax(stream: list[Array]) -> None:
    low, high = seen_range("minmax", stream)
    everything = np.concatenate(stream, axis=1)
    assert np.array_equal(low, everything.min(axis=1))
    assert np.array_equal(high, everything.max(axis=1))


@given(stream=streams(), momentum=st.sampled_from([0.0, 0.5, 0.9, 0.99]))
def test_ema(stream: list[Array], momentum: float) -> None:
    low, high = seen_range("ema-minmax", stream, momentum=momentum)
    expected_low = stream[0].min(axis=1).astype(np.float64)
    expected_high = stream[0].max(axis=1).astype(np.float64)
    for batch in stream[1:]:
        expected_low += (1 - momentum) * (batch.min(axis=1) - expected_low)
        expected_high += (1 - momentum) * (batch.max(axis=1) - expected_high)
    assert np.allclose(low, expected_low, rtol=1e-5, atol=1e-4)
    assert np.allclose(high, expected_high, rtol=1e-5, atol=1e-4)


@given(values=rows(length=60), percentile=st.sampled_from([60.0, 90.0, 99.0, 99.99, 100.0]))
def test_percentile(values: Array, percentile: float) -> None:
    low, high = seen_range("percentile", [values], percentile=percentile)
    tail = (1 - percentile / 100) / 2
    count = values.shape[1]
    for row, lower, upper in zip(values, low, high, strict=True):
        candidates = sorted(row.tolist())
        # the first value with more than the lower tail at or below it; the first with all but the upper tail
        expected_low = next(v for v in candidates if sum(w <= v for w in candidates) > tail * count)
        expected_high = next(v for v in candidates if sum(w <= v for w in candidates) >= (1 - tail) * count)
        assert lower == F32(expected_low)
        assert upper == F32(expected_high)


def errors_by_shrinking(row: Array, bits: int, p: float, symmetric: bool) -> dict[float, float]:
    """Σ|x̂ − x|^p for each of the 81 ranges."""
    n, top = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    found: dict[float, float] = {}
    for percent in range(20, 101):
        low, high = min(row.min() * F32(percent / 100), F32(0)), max(row.max() * F32(percent / 100), F32(0))
        if symmetric:
            scale = max(high / F32(top), low / F32(n), np.finfo(F32).eps)
            zero = F32(0)
        else:
            scale = max((high - low) / F32(top - n), np.finfo(F32).eps)
            zero = np.clip(n - np.rint(low / scale), n, top)
        x_hat = (np.clip(np.rint(row / scale) + zero, n, top) - zero) * scale
        found[percent / 100] = float((np.abs(x_hat - row).astype(np.float64) ** p).sum())
    return found


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(1, 3),
    length=st.integers(1, 200),
    bits=st.integers(2, 10),
    p=st.sampled_from([2.0, 2.4]),
    symmetric=st.booleans(),
)
def test_mse(seed: int, count: int, length: int, bits: int, p: float, symmetric: bool) -> None:
    values = np.random.default_rng(seed).standard_t(3, size=(count, length)).astype(F32)
    low, high = seen_range("mse", [values], f"int{bits}/channel/{'sym' if symmetric else 'asym'}", p=p)
    for row, lower, upper in zip(values, low, high, strict=True):
        errors = errors_by_shrinking(row, bits, p, symmetric)
        end, full = (upper, row.max()) if abs(row.max()) >= abs(row.min()) else (lower, row.min())
        shrink = round(float(end / full), 2)
        assert np.isclose(lower, row.min() * shrink, rtol=1e-6)
        assert np.isclose(upper, row.max() * shrink, rtol=1e-6)
        assert errors[shrink] <= min(errors.values()) * (1 + 1e-5) + 1e-12


def test_mse_clips_outliers_at_few_bits() -> None:
    values = np.random.default_rng(0).normal(size=(1, 4000)).astype(F32)
    values[0, 0] = 8.0
    _, narrow = seen_range("mse", [values], "int4/tensor/sym")
    _, wide = seen_range("mse", [values], "int16/tensor/sym")
    assert narrow[0] < 0.75 * 8.0
    assert wide[0] == 8.0


def divergence(histogram: NDArray[np.float64], used: int, levels: int) -> float:
    """The published method with plain loops over the levels."""
    reference = histogram[:used].copy()
    reference[used - 1] += histogram[used:].sum()
    candidate = np.zeros(used)
    bins_of: dict[int, list[int]] = {}
    for i in range(used):
        bins_of.setdefault(i * levels // used, []).append(i)
    for bins in bins_of.values():
        filled = [i for i in bins if histogram[i] > 0]
        if filled:
            candidate[filled] = histogram[bins].sum() / len(filled)
    if candidate.sum() == 0 or reference.sum() == 0:
        return np.inf
    p, q = reference / reference.sum(), candidate / candidate.sum()
    where = p > 0
    return float((p[where] * np.log(p[where] / np.maximum(q[where], 1e-12))).sum())


@pytest.mark.parametrize(("seed", "bits"), [(0, 4), (1, 8), (2, 8), (3, 2), (4, 3)])
def test_kl(seed: int, bits: int) -> None:
    generator = np.random.default_rng(seed)
    values = np.stack([generator.normal(size=6000), generator.laplace(size=6000) * 3]).astype(F32)
    low, high = seen_range("kl", [values], f"int{bits}/channel/sym")
    levels = 2 ** (bits - 1)
    for row, lower, upper in zip(values, low, high, strict=True):
        top = np.abs(row).max()
        counts, edges = np.histogram(np.abs(row.astype(np.float64)), bins=2048, range=(0.0, float(top)))
        histogram = counts.astype(np.float64)
        histogram[0] = histogram[1]
        tried = [*range(levels, 2048, 8), 2048]
        found = [divergence(histogram, used, levels) for used in tried]
        best = edges[tried[int(np.argmin(found))]]
        assert np.isclose(max(upper, -lower), best, rtol=2e-3)
        assert upper <= row.max()
        assert lower >= row.min()


@pytest.mark.parametrize("name", ["percentile", "mse", "kl"])
@pytest.mark.parametrize("format", ["int8/tensor/sym", "uint8/tensor/asym"])
def test_many_batches_equal_one_big_batch(name: str, format: str) -> None:
    generator = np.random.default_rng(7)
    values = (generator.standard_t(5, size=(2, 40_000)) * [[1.0], [20.0]]).astype(F32)
    if format.startswith("u"):
        values = np.maximum(values, 0)
    whole = seen_range(name, [values], format)
    parts = seen_range(name, np.array_split(values, 37, axis=1), format)
    reach = np.abs(values).max(axis=1)
    # a bin has 2·R/8192, and R may be almost twice the largest value; KL and MSE search on top of it
    tolerance = reach * (2 * 2 / 8192 if name == "percentile" else 0.03)
    for one, many in zip(whole, parts, strict=True):
        assert (np.abs(one - many) <= tolerance).all()


def test_percentile_of_a_stream_is_that_of_all_values() -> None:
    values = np.random.default_rng(3).normal(size=(1, 50_000)).astype(F32)
    low, high = seen_range("percentile", np.array_split(values, 50, axis=1), percentile=99.0)
    assert np.isclose(low[0], np.quantile(values, 0.005), atol=2e-3 * np.abs(values).max())
    assert np.isclose(high[0], np.quantile(values, 0.995), atol=2e-3 * np.abs(values).max())


def test_histogram_range_doubles_without_losing_counts() -> None:
    generator = np.random.default_rng(0)
    observer = OBSERVERS.get("percentile")(format=Format.parse("int8/tensor/sym"))
    seen = []
    for reach in (1.0, 0.5, 8.0, 2.0, 64.0):
        inside = generator.integers(-4096, 4096, size=5000)
        batch = ((inside + 0.5) / 4096 * reach).astype(F32)  # the middle of a bin, so that rounding can't matter
        batch[0] = reach
        observer.observe(torch.from_numpy(batch[None]))
        exact = batch.astype(np.float64)
        if reach == observer.reach if observer.reach is not None else reach == 1.0:
            exact[0] *= 1 - 1e-9  # the end itself belongs to the last bin
        seen.append(exact)
    values = np.concatenate(seen)
    expected, _ = np.histogram(values, bins=8192, range=(-64.0, 64.0))
    assert observer.reach.tolist() == [64.0]
    assert np.array_equal(observer.counts.numpy()[0], expected)


def test_rows_grow_independently() -> None:
    observer = OBSERVERS.get("percentile")(format=Format.parse("int8/channel/sym"), percentile=100.0)
    for scale in (1.0, 3.0):
        batch = np.array([[1.0, -1.0, 0.3], [0.01, -0.02, 0.0], [0.0, 0.0, 0.0]]) * [
            [1.0],
            [scale],
            [scale - 1],
        ]
        observer.observe(torch.from_numpy(batch.astype(F32)))
    assert observer.counts.sum(dim=1).tolist() == [6, 6, 6]
    assert np.allclose(observer.reach.numpy()[:2], [1.0, 0.08])
    low, high = observer.range()
    assert np.allclose(high.numpy(), [1.0, 0.03, 0.0], atol=2e-4)
    assert np.allclose(low.numpy(), [-1.0, -0.06, 0.0], atol=2e-4)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("format", ["int8/tensor/sym", "uint8/tensor/asym"])
def test_all_zeros(name: str, batches: int, format: str) -> None:
    low, high = seen_range(name, [np.zeros((2, 9), F32)] * batches, format)
    assert np.abs(low).max() < 1e-30
    assert np.abs(high).max() < 1e-30


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("value", [-3.0, 1e-20, 2.5, 1e20])
@pytest.mark.parametrize("shape", [(1, 1), (2, 50), (1, 9000)])
@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("format", ["int8/tensor/sym", "uint8/tensor/asym"])
def test_constants_and_single_elements(
    name: str, value: float, shape: tuple[int, int], batches: int, format: str
) -> None:
    low, high = seen_range(name, [np.full(shape, value, F32)] * batches, format)
    end = high if value > 0 else low
    assert np.allclose(end, value, rtol=3e-3, atol=0)
    assert (np.abs(end) <= abs(F32(value))).all()


def test_zeros_first_then_values() -> None:
    for name in ("percentile", "mse", "kl"):
        zeros = np.zeros((1, 9000), F32)
        values = np.random.default_rng(0).uniform(-5, 5, size=(1, 9000)).astype(F32)
        low, high = seen_range(name, [zeros, values, zeros])
        assert 3.9 < high[0] <= 5.0
        assert -5.0 <= low[0] < -3.9


@pytest.mark.parametrize(
    ("name", "options"),
    [("percentile", {"percentile": 40.0}), ("ema-minmax", {"momentum": 1.0}), ("mse", {"p": 0.0})],
)
def test_invalid_observer_options_are_rejected(name: str, options: dict[str, float]) -> None:
    with pytest.raises(BitwrightError):
        OBSERVERS.get(name)(format=Format.parse("int8/tensor/sym"), **options)
