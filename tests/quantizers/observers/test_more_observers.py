"""The observers of the field's quantizers, against their definitions in NumPy and float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from bitwright.core.errors import BitwrightError
from bitwright.core.formats import Format
from bitwright.core.registry import OBSERVERS
from bitwright.quantizers import grid_from_range

Array = NDArray[np.float32]


def batches(seed: int, *, positive: bool = False, rows: int = 2) -> list[Array]:
    generator = np.random.default_rng(seed)
    found = [(generator.standard_t(4, size=(rows, n)) + 0.3).astype(np.float32) for n in (300, 40, 700)]
    return [np.abs(batch) for batch in found] if positive else found


def seen(name: str, data: list[Array], format: str = "int8/channel/sym", **options: Any) -> tuple[Array, Array]:
    observer = OBSERVERS.get(name)(format=Format.parse(format), **options)
    for batch in data:
        observer.observe(torch.from_numpy(batch.copy()))
    low, high = observer.range()
    return low.numpy(), high.numpy()


def scale_of(low: Array, high: Array, format: str) -> Array:
    return grid_from_range(torch.from_numpy(low), torch.from_numpy(high), Format.parse(format), site="").scale.numpy()


@pytest.mark.parametrize("seed", range(4))
def test_average_minmax(seed: int) -> None:
    data = batches(seed)
    low, high = seen("average-minmax", data)
    assert np.allclose(low, np.mean([b.min(1) for b in data], axis=0), rtol=1e-6)
    assert np.allclose(high, np.mean([b.max(1) for b in data], axis=0), rtol=1e-6)


@pytest.mark.parametrize("quantile", [0.9, 0.99, 0.99999])
def test_ema_quantile(quantile: float) -> None:
    data = batches(1)
    low, high = seen("ema-quantile", data, quantile=quantile, momentum=0.8)
    expected: Any = None
    for batch in data:
        limit = np.sort(np.abs(batch), axis=1)[:, int(np.ceil(quantile * batch.shape[1])) - 1]
        ends = np.stack([np.maximum(batch.min(1), -limit), np.minimum(batch.max(1), limit)]).astype(np.float64)
        expected = ends if expected is None else 0.8 * expected + 0.2 * ends
    assert np.allclose([low, high], expected, rtol=1e-6)


def test_ema_mse() -> None:
    data = batches(2)
    low, high = seen("ema-mse", data, "int4/channel/sym", p=2.4)
    expected: Any = None
    for batch in data:
        ends = np.stack(seen("mse", [batch], "int4/channel/sym", p=2.4)).astype(np.float64)
        expected = ends if expected is None else 0.9 * expected + 0.1 * ends
    assert np.allclose([low, high], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("format", "positive", "p"),
    [
        ("int4/channel/sym", False, 7),
        ("int8/channel/sym/narrow", False, 127),
        ("uint4/channel/asym", False, 15),
        ("int4/channel/sym/adasign", True, 15),
        ("int4/channel/sym/adasign", False, 7),
        ("uint8/channel/sym", True, 255),
    ],
)
def test_lsq_start(format: str, positive: bool, p: int) -> None:
    data = batches(3, positive=positive)
    everything = np.concatenate(data, axis=1).astype(np.float64)
    expected = 2 * np.abs(everything).mean(axis=1) / np.sqrt(p)
    assert np.allclose(scale_of(*seen("lsq", data, format), format), expected, rtol=1e-6)


@pytest.mark.parametrize("far", [-20.0, 20.0])
def test_lsq_start_with_a_zero_point_ignores_outliers(far: float) -> None:
    """One far number on either side must not push the range away from all the others."""
    (batch,) = batches(3, rows=1)[:1]
    batch[0, 0] = far
    low, high = seen("lsq", [batch], "uint4/channel/asym")
    clipped = ((batch < low - 0.25) | (batch > high + 0.25)).mean()
    assert low < 0 < high
    assert clipped < 0.05


def test_lsq_start_with_a_zero_point_covers_the_range_if_it_fits() -> None:
    """A range that is long enough has all data in it: on a short side, more codes are left for the other one."""
    batch = np.linspace(-0.5, 3.0, 200, dtype=np.float32)[None]
    low, high = (float(end[0]) for end in seen("lsq", [batch], "uint4/channel/asym"))
    step = (high - low) / 15
    assert low == pytest.approx(-0.5, abs=step / 2 + 1e-6)
    assert high >= 3.0 - step / 2


@pytest.mark.parametrize("positive", [False, True])
def test_lsqplus_start(positive: bool) -> None:
    data = batches(4, positive=positive)
    everything = np.concatenate(data, axis=1).astype(np.float64)
    mean, std = everything.mean(axis=1), everything.std(axis=1)
    m = np.maximum(np.abs(mean - 3 * std), np.abs(mean + 3 * std))
    low, high = seen("lsqplus", data, "int4/channel/sym/adasign")
    assert np.allclose(high, m, rtol=1e-6)
    assert np.allclose(low, 0 if positive else -m, rtol=1e-6)
    low, high = seen("lsqplus", data, "uint4/channel/asym")
    assert np.allclose(low, np.maximum(everything.min(1), -m), rtol=1e-6)
    assert np.allclose(high, np.minimum(everything.max(1), m), rtol=1e-6)


def test_clip_std() -> None:
    data = batches(5)
    everything = np.concatenate(data, axis=1).astype(np.float64)
    mean, std = everything.mean(axis=1), everything.std(axis=1)
    low, high = seen("clip-std", data)
    assert np.allclose(low, np.maximum(everything.min(1), mean - 2.6 * std), rtol=1e-6)
    assert np.allclose(high, np.minimum(everything.max(1), mean + 2.6 * std), rtol=1e-6)
    assert (high < everything.max(1)).all()  # it clips: the seed's own widens


def best_exponent(row: NDArray[np.float64], n: int, p: int) -> int:
    top = int(np.ceil(np.log2(max(row.max() / p, row.min() / n if n else 0.0))))

    def error(e: int) -> float:
        s = 2.0**e
        return float(np.square(np.clip(np.rint(row / s), n, p) * s - row).sum())

    return min(range(top, top - 5, -1), key=error)


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("pot", ["", "/pot"])
def test_pot_floor(bits: int, pot: str) -> None:
    data = [b for b in batches(6) if b.shape[1] <= 8192]
    n, p = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    format = f"int{bits}/channel/sym{pot}"
    scale = scale_of(*seen("pot-floor", data[:1], format), format)
    expected = [2.0 ** best_exponent(row.astype(np.float64), n, p) for row in data[0]]
    assert scale.tolist() == expected


def test_pot_floor_over_batches_is_near_the_whole() -> None:
    data = batches(7)
    whole = seen("pot-floor", [np.concatenate(data, axis=1)], "int4/channel/sym")
    assert np.array_equal(seen("pot-floor", data, "int4/channel/sym"), whole)


def test_pot_mode_takes_the_majority_and_the_wider_of_two() -> None:
    small, large = (np.float32(f) * np.linspace(-1, 1, 50, dtype=np.float32).reshape(1, -1) for f in (1.0, 8.0))
    format = "int4/channel/sym"

    def scale(*data: Array) -> float:
        return float(scale_of(*seen("pot-mode", list(data), format), format)[0])

    assert scale(small, small, large) == scale(small)
    assert scale(small, large, large) == scale(large) == 8 * scale(small)
    assert scale(small, large) == scale(large)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ema-quantile", {"quantile": 0.2}),
        ("ema-quantile", {"momentum": 1.0}),
        ("ema-mse", {"p": 0.0}),
        ("clip-std", {"deviations": -1.0}),
    ],
)
def test_wrong_options(name: str, options: dict[str, float]) -> None:
    with pytest.raises(BitwrightError):
        OBSERVERS.get(name)(format=Format.parse("int8/tensor/sym"), **options)
