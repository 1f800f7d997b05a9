"""The mean over batches of each batch's lowest and highest value."""

from __future__ import annotations

from torch import Tensor

from bitwright.attach import Observer, extremes
from bitwright.formats import Format


class AverageMinMax(Observer):
    """Every batch counts the same, however many there are."""

    def __init__(self, *, format: Format) -> None:
        super().__init__(format=format)
        self.batches = 0
        self.low: Tensor | None = None
        self.high: Tensor | None = None

    def observe(self, rows: Tensor) -> None:
        """Move the means."""
        low, high = extremes(rows)
        self.batches += 1
        self.low = low if self.low is None else self.low + (low - self.low) / self.batches
        self.high = high if self.high is None else self.high + (high - self.high) / self.batches

    def range(self) -> tuple[Tensor, Tensor]:
        """The means."""
        assert self.low is not None
        assert self.high is not None
        return self.low, self.high
