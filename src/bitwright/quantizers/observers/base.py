"""Base classes of observers: extremes, means or the distribution of the values at a site."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from bitwright.core.formats import Format
from bitwright.quantizers.grid import SMALLEST, extremes

BINS = 8192
_LARGEST = torch.finfo(torch.float32).max
_TINY = torch.finfo(torch.float32).tiny  # the range R of a row that contains only zeros


class Observer:
    """Finds the range of a site from its inputs."""

    # A range that excludes outliers is an estimate. The mean of several processes' estimates is a better one, while
    # their extremes would include the outliers again.
    merge: ClassVar[Literal["extremes", "mean"]] = "mean"
    """How to merge the ranges of several processes."""

    by_batch: ClassVar[bool] = True
    """Whether the range depends on the division into batches. If not, calibration may use smaller batches."""

    shows_infinities: ClassVar[bool] = False
    """Whether NaN and infinity in the input make the range non-finite. If not, the data is checked separately."""

    def __init__(self, *, format: Format) -> None:
        self.format = format

    def observe(self, rows: Tensor) -> None:
        """Observe one batch: float32, one row per scale."""
        raise NotImplementedError

    def range(self) -> tuple[Tensor, Tensor]:
        """The lowest and highest value to represent, per row."""
        raise NotImplementedError


class RangeObserver(Observer):
    """Keeps the minimum and the maximum over all batches."""

    def __init__(self, *, format: Format) -> None:
        super().__init__(format=format)
        self.low: Tensor | None = None
        self.high: Tensor | None = None

    def observe(self, rows: Tensor) -> None:
        low, high = extremes(rows)
        self.low = low if self.low is None else torch.minimum(self.low, low)
        self.high = high if self.high is None else torch.maximum(self.high, high)

    def ends(self) -> tuple[Tensor, Tensor]:
        """The exact minimum and maximum."""
        assert self.low is not None
        assert self.high is not None
        return self.low, self.high


class MomentsObserver(RangeObserver):
    """Minimum and maximum, and the sums of |x|, x and x²."""

    by_batch = False

    def __init__(self, *, format: Format) -> None:
        super().__init__(format=format)
        self.count = 0
        self.sums: Tensor | None = None  # sums of |x|, x and x²; one column per row of data

    def observe(self, rows: Tensor) -> None:
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


class HistogramObserver(RangeObserver):
    """Collects values: exactly for one small batch (a weight), otherwise as a histogram that grows with the data.

    Bins cover [−R, R]. When a value is outside, R doubles and neighbouring bins are merged, which is exact. Memory use
    is constant for any length of the calibration stream, and earlier batches are not needed again.
    """

    def __init__(self, *, format: Format) -> None:
        super().__init__(format=format)
        self.reach: Tensor | None = None
        self.counts: Tensor | None = None
        self._only: Tensor | None = None

    def observe(self, rows: Tensor) -> None:
        first = self.low is None
        super().observe(rows)
        if first and rows.shape[1] <= BINS:
            self._only = rows.clone()
            return
        if self._only is not None:
            kept, self._only = self._only, None
            self._count(kept)
        self._count(rows)

    def _count(self, rows: Tensor) -> None:
        largest = rows.abs().amax(dim=1).clamp(min=_TINY)
        if self.reach is None or self.counts is None:
            self.reach = largest.double()  # twice the largest float32 exceeds float32
            self.counts = torch.zeros(rows.shape[0], BINS, dtype=torch.float64, device=rows.device)
        # Zeros are in the same bin for any R, so R is not doubled until the first nonzero value.
        self.reach = torch.where(self.reach == _TINY, largest.double(), self.reach)
        while bool((largest > self.reach).any()):
            grow = largest > self.reach
            merged = torch.zeros_like(self.counts)
            merged[:, BINS // 4 : BINS * 3 // 4] = self.counts.reshape(-1, BINS // 2, 2).sum(-1)
            self.counts = torch.where(grow[:, None], merged, self.counts)
            self.reach = torch.where(grow, self.reach * 2, self.reach)
        shrink = 0.25 if bool((self.reach > _LARGEST).any()) else 1.0  # a power of two: exact
        share = (rows * shrink) / (self.reach * shrink).to(rows.dtype)[:, None]
        position = ((share + 1) * (BINS / 2)).long().clamp_(0, BINS - 1)
        ones = torch.ones((), dtype=torch.float64, device=rows.device).expand_as(rows)
        self.counts.scatter_add_(1, position, ones)

    def samples(self) -> tuple[Tensor, Tensor]:
        """Sorted values and their counts, per row."""
        if self._only is not None:
            values = self._only.sort(dim=1).values
            return values, torch.ones_like(values, dtype=torch.float64)
        assert self.reach is not None
        assert self.counts is not None
        centres = (torch.arange(BINS, device=self.reach.device) + 0.5) * (2 / BINS) - 1
        values = centres.double()[None, :] * self.reach[:, None]
        return values.clamp(-_LARGEST, _LARGEST).float(), self.counts


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
