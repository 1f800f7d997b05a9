"""Ranges without outliers: a quantile of the values, or a few standard deviations around the mean."""

from __future__ import annotations

import torch
from torch import Tensor

from bitwright.core.errors import BitwrightError
from bitwright.core.formats import Format
from bitwright.quantizers.observers.base import HistogramObserver, MomentsObserver


class Percentile(HistogramObserver):
    """Covers `percentile` percent of the values. Half of the rest is clipped at each end."""

    def __init__(self, *, format: Format, percentile: float = 99.99) -> None:
        super().__init__(format=format)
        if not 50.0 < percentile <= 100.0:
            raise BitwrightError(
                "percentile must be in (50, 100]", value=percentile, fix="99.99", code="invalid-options"
            )
        self.percentile = percentile

    def range(self) -> tuple[Tensor, Tensor]:
        """The two quantiles, within the observed range."""
        values, counts = self.samples()
        low, high = self.ends()
        below = counts.cumsum(dim=1)
        total = below[:, -1:]
        tail = (1 - self.percentile / 100) / 2
        # the last value with at most `tail` of the mass strictly below it, and the symmetric one
        first = (below <= tail * total).sum(dim=1).clamp(max=values.shape[1] - 1)
        last = (below < (1 - tail) * total).sum(dim=1).clamp(max=values.shape[1] - 1)
        rows = torch.arange(values.shape[0], device=values.device)
        return torch.maximum(values[rows, first], low), torch.minimum(values[rows, last], high)


class ClipStd(MomentsObserver):
    """μ ± k·σ over all batches (k = 2.6), within the observed range."""

    def __init__(self, *, format: Format, deviations: float = 2.6) -> None:
        super().__init__(format=format)
        if deviations <= 0:
            raise BitwrightError("deviations must be positive", value=deviations, fix="2.6", code="invalid-options")
        self.deviations = deviations

    def range(self) -> tuple[Tensor, Tensor]:
        low, high = self.ends()
        mean, std = self.mean_std()
        return torch.maximum(low, mean - self.deviations * std), torch.minimum(high, mean + self.deviations * std)
