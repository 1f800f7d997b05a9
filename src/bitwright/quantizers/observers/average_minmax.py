"""The mean over batches of each batch's lowest and highest value."""

from __future__ import annotations

import torch
from torch import Tensor

from bitwright.core.formats import Format
from bitwright.quantizers.grid import extremes
from bitwright.quantizers.observers.base import Observer


def _moved(mean: Tensor, value: Tensor, count: int) -> Tensor:
    """Update a mean with one more value. If the difference exceeds float32, it is computed from scaled values."""
    moved = mean + (value - mean) / count
    return torch.where(moved.isfinite(), moved, mean + (value / count - mean / count))


class AverageMinMax(Observer):
    """The mean over batches of their minimum and maximum. All batches have the same weight."""

    def __init__(self, *, format: Format) -> None:
        super().__init__(format=format)
        self.batches = 0
        self.low: Tensor | None = None
        self.high: Tensor | None = None

    def observe(self, rows: Tensor) -> None:
        """Update the means."""
        low, high = extremes(rows)
        self.batches += 1
        self.low = low if self.low is None else _moved(self.low, low, self.batches)
        self.high = high if self.high is None else _moved(self.high, high, self.batches)

    def range(self) -> tuple[Tensor, Tensor]:
        """The means."""
        assert self.low is not None
        assert self.high is not None
        return self.low, self.high
