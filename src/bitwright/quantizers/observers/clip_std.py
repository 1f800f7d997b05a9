"""The range of a few standard deviations around the mean."""

from __future__ import annotations

import torch
from torch import Tensor

from bitwright.core.errors import BitwrightError
from bitwright.core.formats import Format
from bitwright.quantizers.observers.base import MomentsObserver


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
