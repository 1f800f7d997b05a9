"""Base classes of observers that need means, or that compute a scale instead of a range."""

from __future__ import annotations

import torch
from torch import Tensor

from bitwright.core.formats import Format
from bitwright.quantizers.grid import SMALLEST
from bitwright.quantizers.observers.minmax import MinMax


def resolved_sign(format: Format, low: Tensor) -> Format:
    """The format with an adaptive sign replaced according to the lowest value."""
    return format.unsigned() if format.adasign and bool((low >= 0).all()) else format


def range_of_scale(scale: Tensor, low: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """[n·s, p·s]. For an asymmetric format, the same number of steps from the lowest value."""
    format = resolved_sign(format, low)
    if not format.symmetric:
        span = scale * (format.qmax - format.qmin)
        bottom = torch.maximum(torch.round(low.clamp(max=0.0) / scale) * scale, -span)
        return bottom, bottom + span
    # Negative numbers at an unsigned site are reported by the quantizer, which knows the site.
    return scale * format.qmin if format.signed else low.clamp(max=0.0), scale * format.qmax


def observed_if_too_small(
    ends: tuple[Tensor, Tensor], low: Tensor, high: Tensor, format: Format
) -> tuple[Tensor, Tensor]:
    """The range, or the observed range where the scale would be below the smallest normal number."""
    small = torch.maximum(high, -low) / max(format.qmax, -format.qmin) < SMALLEST
    return torch.where(small, low, ends[0]), torch.where(small, high, ends[1])


def empty_if_zeros(ends: tuple[Tensor, Tensor], low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """The range, or an empty range where only zeros were observed. The quantizer handles empty ranges."""
    zeros = (low == 0) & (high == 0)
    return torch.where(zeros, 0.0, ends[0]), torch.where(zeros, 0.0, ends[1])


class MomentsObserver(MinMax):
    """Minimum and maximum, and the sums of |x|, x and x²."""

    merge = "mean"  # ranges depend on means, not on the extremes
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
