"""A moving average of each batch's range without outliers."""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor

from bitwright.core.errors import BitwrightError
from bitwright.core.formats import Format
from bitwright.quantizers.observers.ema_minmax import EmaMinMax


class EmaQuantile(EmaMinMax):
    """Clips each batch at the given quantile of |x|, computed exactly."""

    def __init__(self, *, format: Format, momentum: float = 0.9, quantile: float = 0.99999) -> None:
        super().__init__(format=format, momentum=momentum)
        if not 0.5 < quantile <= 1.0:
            raise BitwrightError("quantile must be in (0.5, 1]", value=quantile, fix="0.99999", code="invalid-options")
        self.quantile = quantile

    def observe(self, rows: Tensor) -> None:
        """Update the averages."""
        magnitudes = rows.abs()
        limit = magnitudes.kthvalue(max(1, ceil(self.quantile * rows.shape[1])), dim=1, keepdim=True).values
        super().observe(torch.maximum(torch.minimum(rows, limit), -limit))
