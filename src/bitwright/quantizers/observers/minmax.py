"""Minimum and maximum over all batches, or averages of the batches' ranges, with or without outliers."""

from __future__ import annotations

from math import ceil
from typing import ClassVar, Literal

import torch
from torch import Tensor

from bitwright.core.errors import BitwrightError
from bitwright.core.formats import Format
from bitwright.quantizers.grid import extremes
from bitwright.quantizers.observers.base import Observer, RangeObserver
from bitwright.quantizers.observers.histogram import Mse


class MinMax(RangeObserver):
    """Minimum and maximum over all batches."""

    merge: ClassVar[Literal["extremes", "mean"]] = "extremes"  # cover the values of all processes
    by_batch: ClassVar[bool] = False
    shows_infinities: ClassVar[bool] = True

    def range(self) -> tuple[Tensor, Tensor]:
        return self.ends()


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
        low, high = extremes(rows)
        self.batches += 1
        self.low = low if self.low is None else _moved(self.low, low, self.batches)
        self.high = high if self.high is None else _moved(self.high, high, self.batches)

    def range(self) -> tuple[Tensor, Tensor]:

        assert self.low is not None
        assert self.high is not None
        return self.low, self.high


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
        low, high = extremes(rows)
        if self.low is None or self.high is None:
            self.low, self.high = low, high
        else:
            self.low = self.momentum * self.low + (1 - self.momentum) * low
            self.high = self.momentum * self.high + (1 - self.momentum) * high

    def range(self) -> tuple[Tensor, Tensor]:
        assert self.low is not None
        assert self.high is not None
        return self.low, self.high


class EmaQuantile(EmaMinMax):
    """Clips each batch at the given quantile of |x|, computed exactly."""

    def __init__(self, *, format: Format, momentum: float = 0.9, quantile: float = 0.99999) -> None:
        super().__init__(format=format, momentum=momentum)
        if not 0.5 < quantile <= 1.0:
            raise BitwrightError("quantile must be in (0.5, 1]", value=quantile, fix="0.99999", code="invalid-options")
        self.quantile = quantile

    def observe(self, rows: Tensor) -> None:
        magnitudes = rows.abs()
        limit = magnitudes.kthvalue(max(1, ceil(self.quantile * rows.shape[1])), dim=1, keepdim=True).values
        super().observe(torch.maximum(torch.minimum(rows, limit), -limit))


class EmaMse(EmaMinMax):
    """Applies `mse` to each batch, then `ema-minmax` to the ranges."""

    def __init__(self, *, format: Format, momentum: float = 0.9, p: float = 2.0) -> None:
        super().__init__(format=format, momentum=momentum)
        self.p = p
        Mse(format=format, p=p)  # validates p

    def observe(self, rows: Tensor) -> None:
        batch = Mse(format=self.format, p=self.p)
        batch.observe(rows)
        super().observe(torch.stack(batch.range(), dim=1))
