"""The range whose quantized distribution tells most of the original (least Kullback-Leibler divergence)."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bitwright.observers.histogram import HistogramObserver

_BINS = 2048  # of |x|, as in the published method


class Kl(HistogramObserver):
    """Tries thresholds on |x|; what lies beyond counts into the last bin; the least divergence wins."""

    def range(self) -> tuple[Tensor, Tensor]:
        """[max(min, −t), min(max, t)] per row."""
        values, counts = self.samples()
        low, high = self.ends()
        limits = [
            _threshold(np.abs(v.astype(np.float64)), c, 2 ** (self.format.bits - 1))
            for v, c in zip(values.cpu().numpy(), counts.cpu().numpy(), strict=True)
        ]
        limit = torch.tensor(limits, dtype=low.dtype, device=low.device)
        return torch.maximum(low, -limit), torch.minimum(high, limit)


def _threshold(magnitudes: NDArray[np.floating], counts: NDArray[np.floating], levels: int) -> float:
    top = float(magnitudes[counts > 0].max(initial=0.0))
    if top == 0.0 or levels >= _BINS:
        return top
    histogram, edges = np.histogram(magnitudes, bins=_BINS, range=(0.0, top), weights=counts)
    # Zeros (after ReLU or padding) cost nothing in any range; counting them would favour small thresholds.
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
    # Each level covers a run of bins and spreads its mass over those of them that are not empty.
    level = (np.arange(used) * levels // used).astype(np.intp)
    mass = np.bincount(level, weights=histogram[:used], minlength=levels)
    filled = np.bincount(level, weights=(histogram[:used] > 0).astype(np.float64), minlength=levels)
    candidate = np.where(histogram[:used] > 0, (mass / np.maximum(filled, 1))[level], 0.0)
    if candidate.sum() == 0:
        return float("inf")
    p, q = reference / reference.sum(), candidate / candidate.sum()
    where = p > 0
    return float(np.sum(p[where] * np.log(p[where] / np.maximum(q[where], 1e-12))))
