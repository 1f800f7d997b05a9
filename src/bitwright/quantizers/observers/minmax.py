"""The range that covers all observed values."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from bitwright.core.formats import Format
from bitwright.quantizers.grid import extremes
from bitwright.quantizers.observers.base import Observer


class MinMax(Observer):
    """Minimum and maximum over all batches."""

    merge: ClassVar[Literal["extremes", "mean"]] = "extremes"  # cover the values of all processes
    by_batch: ClassVar[bool] = False
    shows_infinities: ClassVar[bool] = True

    def __init__(self, *, format: Format) -> None:
        super().__init__(format=format)
        self.low: Tensor | None = None
        self.high: Tensor | None = None

    def observe(self, rows: Tensor) -> None:
        """Widen the range."""
        low, high = extremes(rows)
        self.low = low if self.low is None else torch.minimum(self.low, low)
        self.high = high if self.high is None else torch.maximum(self.high, high)

    def range(self) -> tuple[Tensor, Tensor]:
        """The observed range."""
        assert self.low is not None
        assert self.high is not None
        return self.low, self.high
