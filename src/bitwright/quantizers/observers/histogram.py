"""The base class of observers that need the distribution: a histogram that grows with the data.

Bins cover [−R, R]. When a value is outside, R doubles and neighbouring bins are merged, which is exact. Memory use is
constant for any length of the calibration stream, and earlier batches are not needed again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitwright.core.formats import Format
from bitwright.quantizers.grid import extremes
from bitwright.quantizers.observers.base import Observer

BINS = 8192
_LARGEST = torch.finfo(torch.float32).max
_TINY = torch.finfo(torch.float32).tiny  # the range R of a row that contains only zeros


class HistogramObserver(Observer):
    """Collects values: exactly for one small batch (a weight), otherwise as a histogram."""

    def __init__(self, *, format: Format) -> None:
        super().__init__(format=format)
        self.low: Tensor | None = None
        self.high: Tensor | None = None
        self.reach: Tensor | None = None
        self.counts: Tensor | None = None
        self._only: Tensor | None = None

    def observe(self, rows: Tensor) -> None:
        """Add a batch."""
        low, high = extremes(rows)
        first = self.low is None
        self.low = low if self.low is None else torch.minimum(self.low, low)
        self.high = high if self.high is None else torch.maximum(self.high, high)
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

    def ends(self) -> tuple[Tensor, Tensor]:
        """The exact minimum and maximum."""
        assert self.low is not None
        assert self.high is not None
        return self.low, self.high
