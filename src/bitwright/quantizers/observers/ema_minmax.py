"""A moving average of each batch's minimum and maximum, which limits the influence of a single batch."""

from __future__ import annotations

from torch import Tensor

from bitwright.core.errors import BitwrightError
from bitwright.core.formats import Format
from bitwright.quantizers.grid import extremes
from bitwright.quantizers.observers.base import Observer


class EmaMinMax(Observer):
    """low ← m·low + (1−m)·min(batch), high accordingly. The first batch is the initial value."""

    def __init__(self, *, format: Format, momentum: float = 0.9) -> None:
        super().__init__(format=format)
        if not 0.0 <= momentum < 1.0:
            raise BitwrightError("momentum must be in [0, 1)", value=momentum, fix="0.9", code="invalid-options")
        self.momentum = momentum
        self.low: Tensor | None = None
        self.high: Tensor | None = None

    def observe(self, rows: Tensor) -> None:
        """Update the average."""
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
