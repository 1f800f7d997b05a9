"""A moving average of each batch's lowest and highest value: one odd batch doesn't set the range."""

from __future__ import annotations

from torch import Tensor

from bitwright.core.errors import BitwrightError
from bitwright.core.formats import Format
from bitwright.quantizers.grid import extremes
from bitwright.quantizers.observers.base import Observer


class EmaMinMax(Observer):
    """low ← m·low + (1−m)·min(batch), high likewise; the first batch starts the average."""

    def __init__(self, *, format: Format, momentum: float = 0.9) -> None:
        super().__init__(format=format)
        if not 0.0 <= momentum < 1.0:
            raise BitwrightError("momentum lies in [0, 1)", value=momentum, fix="0.9")
        self.momentum = momentum
        self.low: Tensor | None = None
        self.high: Tensor | None = None

    def observe(self, rows: Tensor) -> None:
        """Move the average."""
        low, high = extremes(rows)
        if self.low is None or self.high is None:
            self.low, self.high = low, high
        else:
            self.low = self.momentum * self.low + (1 - self.momentum) * low
            self.high = self.momentum * self.high + (1 - self.momentum) * high

    def range(self) -> tuple[Tensor, Tensor]:
        """The averages."""
        assert self.low is not None
        assert self.high is not None
        return self.low, self.high
