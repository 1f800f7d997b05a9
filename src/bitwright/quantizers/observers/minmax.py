"""The range that covers all observed values."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from bitwright.quantizers.observers.base import RangeObserver


class MinMax(RangeObserver):
    """Minimum and maximum over all batches."""

    merge: ClassVar[Literal["extremes", "mean"]] = "extremes"  # cover the values of all processes
    by_batch: ClassVar[bool] = False
    shows_infinities: ClassVar[bool] = True

    def range(self) -> tuple[Tensor, Tensor]:
        return self.ends()
