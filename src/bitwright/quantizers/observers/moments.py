"""Bases of observers that need means, or that find a scale instead of a range."""

from __future__ import annotations

import torch
from torch import Tensor

from bitwright.core.formats import Format
from bitwright.quantizers.grid import SMALLEST
from bitwright.quantizers.observers.minmax import MinMax


def settled(format: Format, low: Tensor) -> Format:
    """The format that a grid will have: an adaptive sign is settled by the lowest value."""
    return format.unsigned() if format.adasign and bool((low >= 0).all()) else format


def range_of_scale(scale: Tensor, low: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """[n·s, p·s], or for an asymmetric format as many steps from the lowest value on."""
    format = settled(format, low)
    if not format.symmetric:
        span = scale * (format.qmax - format.qmin)
        bottom = torch.maximum(torch.round(low.clamp(max=0.0) / scale) * scale, -span)
        return bottom, bottom + span
    # Negative numbers at an unsigned site are reported by the quantizer, which knows the site.
    return scale * format.qmin if format.signed else low.clamp(max=0.0), scale * format.qmax


def unless_too_small(ends: tuple[Tensor, Tensor], low: Tensor, high: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """The range; the observed one where its scale is below the smallest normal number, which the quantizer refuses."""
    small = torch.maximum(high, -low) / max(format.qmax, -format.qmin) < SMALLEST
    return torch.where(small, low, ends[0]), torch.where(small, high, ends[1])


def unless_zeros(ends: tuple[Tensor, Tensor], low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """The range; an empty one where only zeros were seen, of which the quantizer knows what to do."""
    zeros = (low == 0) & (high == 0)
    return torch.where(zeros, 0.0, ends[0]), torch.where(zeros, 0.0, ends[1])


class MomentsObserver(MinMax):
    """Lowest and highest value, and the sums of |x|, x and x²."""

    merge = "mean"  # ranges follow from means, not from the ends
    shows_infinities = False

    def __init__(self, *, format: Format) -> None:
        super().__init__(format=format)
        self.count = 0
        self.sums: Tensor | None = None  # of |x|, x, x²; one column per row of data

    def observe(self, rows: Tensor) -> None:
        """Add a batch."""
        super().observe(rows)
        exact = rows.double()
        sums = torch.stack([exact.abs().sum(dim=1), exact.sum(dim=1), exact.square().sum(dim=1)])
        self.sums = sums if self.sums is None else self.sums + sums
        self.count += rows.shape[1]

    def mean_abs(self) -> Tensor:
        """mean |x|."""
        assert self.sums is not None
        return (self.sums[0] / self.count).float()

    def mean_std(self) -> tuple[Tensor, Tensor]:
        """μ and σ (of the population)."""
        assert self.sums is not None
        mean = self.sums[1] / self.count
        variance = (self.sums[2] / self.count - mean.square()).clamp(min=0.0)
        return mean.float(), variance.sqrt().float()
