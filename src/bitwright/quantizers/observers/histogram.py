"""Ranges from the distribution of the values: mse, kl and percentile."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bitwright.core.errors import BitwrightError
from bitwright.core.formats import Format
from bitwright.quantizers.grid import SMALLEST, extremes, grid_from_range, size_of
from bitwright.quantizers.observers.base import HistogramObserver

_BINS = 2048  # of |x|, as published
_CLIPPED, _WORSE = 0.01, 4.0  # reject ranges that clip more than this share and lose this much more than the full range
_CHUNK = 1 << 16  # elements at a time, so that temporaries stay in the cache
_FACTORS = (1.0, 0.96, 1.04, 0.92, 0.88, 0.84, 0.8, 0.75, 0.7, 0.65, 0.6)
_FLIPPED = (0.98, 1.04, 1.1, 1.16)
"""Factors for the other sign of a `full` scale, with which the largest value gets the highest code or is clipped."""


class Mse(HistogramObserver):
    """Minimizes Σ|x̂ − x|^p over ranges α·[min, max], α = 1, 0.99, … 0.20 (p = 2, or 2.4 for longer tails).

    Above 10 bits, the rounding error is smaller than a histogram bin, so the full range is used. For groups of weights
    and p = 2, fewer candidates are refined by least squares (`best_range`), and no copy of the weight is kept.
    """

    def __init__(self, *, format: Format, p: float = 2.0) -> None:
        super().__init__(format=format)
        if p <= 0:
            raise BitwrightError("p must be positive", value=p, fix="2.0", code="invalid-options")
        self.p = p
        self._found: tuple[Tensor, Tensor] | None = None

    def observe(self, rows: Tensor) -> None:
        """Observe one batch. The range of groups is searched at once; that of several batches covers all of theirs."""
        if not (self.format.granularity == "group" and self.p == 2.0 and self.format.bits <= 10):
            super().observe(rows)
            return
        low, high = best_range(rows, self.format)
        if self._found is not None:
            low, high = torch.minimum(low, self._found[0]), torch.maximum(high, self._found[1])
        self._found = low, high

    def range(self) -> tuple[Tensor, Tensor]:
        """The best of the ranges."""
        if self._found is not None:
            return self._found
        low, high = self.ends()
        if self.format.bits > 10:
            return low, high
        values, counts = self.samples()
        # Negative numbers at an unsigned symmetric site are reported by the quantizer, which knows the site.
        bottom = low if self.format.signed or not self.format.symmetric else low.clamp(min=0.0)
        best = torch.full_like(low, float("inf"), dtype=torch.float64)
        chosen = torch.ones_like(low)
        for percent in range(100, 19, -1):
            shrink = percent / 100
            error = self._error(values, counts, bottom * shrink, high * shrink)
            better = error < best
            best = torch.where(better, error, best)
            chosen = torch.where(better, torch.full_like(chosen, shrink), chosen)
        return low * chosen, high * chosen

    def _error(self, values: Tensor, counts: Tensor, low: Tensor, high: Tensor) -> Tensor:
        grid = grid_from_range(low, high, self.format)
        scale, zero_point = grid.scale[:, None], grid.zero_point[:, None]
        codes = torch.clamp(torch.round(values / scale) + zero_point, grid.qmin, grid.qmax)
        return (((codes - zero_point) * scale - values).abs().double().pow(self.p) * counts).sum(dim=1)


@torch.no_grad()
def best_range(rows: Tensor, format: Format, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The range per row whose grid has the smallest Σ w·(x̂ − x)², where w is the importance (default 1).

    Each candidate scale gives integer codes k; the scale Σw·x·k / Σw·k² is the best one for these codes. Candidates
    are fractions of the smallest scale that covers the row. `importance` broadcasts to `rows`.

    >>> rows = torch.tensor([[0.9, -2.0, 0.1, 0.4]])
    >>> low, high = best_range(rows, Format.parse("int4/group4/sym/full"))
    >>> bool(low < 0) != bool(high > 0)  # the scale has a sign: the range is on one side of zero
    True
    """
    low, high = torch.empty(rows.shape[0]), torch.empty(rows.shape[0])
    low, high = low.to(rows.device), high.to(rows.device)
    step = max(1, _CHUNK // rows.shape[1])
    if importance is not None:
        importance = importance.expand_as(rows)
    for start in range(0, rows.shape[0], step):
        part = slice(start, start + step)
        low[part], high[part] = _search(rows[part], format, None if importance is None else importance[part])
    return low, high


def _search(rows: Tensor, format: Format, importance: Tensor | None) -> tuple[Tensor, Tensor]:
    unit = size_of(rows)[:, None]  # squares of very small or large numbers exceed the range of float32
    x = rows / unit
    low, high = extremes(x)
    weighted = x if importance is None else x * importance
    whole = grid_from_range(low, high if format.signed or not format.symmetric else high.clamp(min=0.0), format)
    ends = torch.tensor([whole.qmin, whole.qmax])
    best = torch.full_like(low, -1.0)
    scale, zero = whole.scale.clone(), whole.zero_point.clone()
    tried = [(factor, 1.0) for factor in _FACTORS]
    if format.full:
        tried += [(factor, -1.0) for factor in _FLIPPED]
    for factor, sign in tried:
        grid = whole if format.symmetric else grid_from_range(low * factor, high * factor, format)
        first = grid.scale * (factor * sign) if format.symmetric else grid.scale
        bottom, top = (end - grid.zero_point[:, None] for end in ends)
        codes = torch.div(x, first[:, None]).round_().clamp_(bottom, top)
        product = (weighted * codes).sum(dim=1)
        square = codes.square() if importance is None else codes.square().mul_(importance)
        power = square.sum(dim=1).clamp(min=SMALLEST)
        gain = product.square() / power  # the squared error is Σw·x² minus this
        fitted = product / power
        better = (gain > best) & (fitted * sign * whole.scale > 0)
        best = torch.where(better, gain, best)
        scale = torch.where(better, fitted, scale)
        zero = torch.where(better, grid.zero_point, zero)
    span = (whole.qmin - zero) * scale, (whole.qmax - zero) * scale
    if format.full:
        span = span[0].clamp(max=0.0), span[0].clamp(min=0.0)
    elif format.symmetric and not format.signed:
        span = low.clamp(max=0.0), span[1]  # the quantizer reports negative numbers
    zeros = (low == 0) & (high == 0)
    found = [torch.where(zeros, 0.0, end * unit[:, 0]) for end in span]
    return found[0], found[1]


class Kl(HistogramObserver):
    """Tries thresholds on |x| and chooses the smallest divergence. Values beyond a threshold count in the last bin.

    With few values, the histogram has more bins than values. Then a threshold below nearly all values can have zero
    divergence. A range that loses much more than the full range is not used.
    """

    def range(self) -> tuple[Tensor, Tensor]:
        """[max(min, −t), min(max, t)] per row."""
        values, counts = self.samples()
        low, high = self.ends()
        limits = [
            _threshold(np.abs(v.astype(np.float64)), c, 2 ** (self.format.bits - 1))
            for v, c in zip(values.cpu().numpy(), counts.cpu().numpy(), strict=True)
        ]
        limit = torch.tensor(limits, dtype=low.dtype, device=low.device)
        bottom, top = torch.maximum(low, -limit), torch.minimum(high, limit)
        lost, clipped = self._lost(values, counts, bottom, top)
        lost_by_all, _ = self._lost(values, counts, low, high)
        sparse = (clipped > _CLIPPED) & (lost > _WORSE * lost_by_all)
        return torch.where(sparse, low, bottom), torch.where(sparse, high, top)

    def _lost(self, values: Tensor, counts: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """The share of Σx² that a range loses, and the share of values that it clips."""
        # Negative numbers at an unsigned symmetric site are reported by the quantizer, which knows the site.
        floor = low if self.format.signed or not self.format.symmetric else low.clamp(min=0.0)
        grid = grid_from_range(floor, high, self.format)
        scale, zero_point = grid.scale[:, None], grid.zero_point[:, None]
        codes = torch.clamp(torch.round(values / scale) + zero_point, grid.qmin, grid.qmax)
        exact, energy = values.double(), (values.double().square() * counts).sum(dim=1).clamp(min=1e-300)
        rounding = ((codes - zero_point).double() * scale.double() - exact).square()
        beyond = (exact < low.double()[:, None]) | (exact > high.double()[:, None])
        clipped = (beyond * counts).sum(dim=1) / counts.sum(dim=1).clamp(min=1e-300)
        return (rounding * counts).sum(dim=1) / energy, clipped


def _threshold(magnitudes: NDArray[np.floating], counts: NDArray[np.floating], levels: int) -> float:
    top = float(magnitudes[counts > 0].max(initial=0.0))
    if top == 0.0 or levels >= _BINS:
        return top
    histogram, edges = np.histogram(magnitudes, bins=_BINS, range=(0.0, top), weights=counts)
    # Zeros (after ReLU or padding) have no error in any range; counting them would favour small thresholds.
    histogram[0] = histogram[1]
    best, chosen = np.inf, _BINS
    for used in [*range(levels, _BINS, 8), _BINS]:
        divergence = _divergence(histogram, used, levels)
        if divergence < best:
            best, chosen = divergence, used
    return float(edges[chosen])


def _divergence(histogram: NDArray[np.floating], used: int, levels: int) -> float:
    reference = histogram[:used].copy()
    reference[-1] += histogram[used:].sum()
    if reference.sum() == 0:
        return float("inf")
    # Each level covers several bins and distributes its mass over the non-empty ones.
    level = (np.arange(used) * levels // used).astype(np.intp)
    mass = np.bincount(level, weights=histogram[:used], minlength=levels)
    filled = np.bincount(level, weights=(histogram[:used] > 0).astype(np.float64), minlength=levels)
    candidate = np.where(histogram[:used] > 0, (mass / np.maximum(filled, 1))[level], 0.0)
    if candidate.sum() == 0:
        return float("inf")
    p, q = reference / reference.sum(), candidate / candidate.sum()
    where = p > 0
    return float(np.sum(p[where] * np.log(p[where] / np.maximum(q[where], 1e-12))))


class Percentile(HistogramObserver):
    """Covers `percentile` percent of the values. Half of the rest is clipped at each end."""

    def __init__(self, *, format: Format, percentile: float = 99.99) -> None:
        super().__init__(format=format)
        if not 50.0 < percentile <= 100.0:
            raise BitwrightError(
                "percentile must be in (50, 100]", value=percentile, fix="99.99", code="invalid-options"
            )
        self.percentile = percentile

    def range(self) -> tuple[Tensor, Tensor]:
        """The two quantiles, within the observed range."""
        values, counts = self.samples()
        low, high = self.ends()
        below = counts.cumsum(dim=1)
        total = below[:, -1:]
        tail = (1 - self.percentile / 100) / 2
        # the last value with at most `tail` of the mass strictly below it, and the symmetric one
        first = (below <= tail * total).sum(dim=1).clamp(max=values.shape[1] - 1)
        last = (below < (1 - tail) * total).sum(dim=1).clamp(max=values.shape[1] - 1)
        rows = torch.arange(values.shape[0], device=values.device)
        return torch.maximum(values[rows, first], low), torch.minimum(values[rows, last], high)
