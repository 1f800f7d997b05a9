"""The range with the smallest Kullback-Leibler divergence between the quantized and the original distribution."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bitwright.quantizers.grid import grid_from_range
from bitwright.quantizers.observers.base import HistogramObserver

_BINS = 2048  # of |x|, as published
_CLIPPED, _WORSE = 0.01, 4.0  # reject ranges that clip more than this share and lose this much more than the full range


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
