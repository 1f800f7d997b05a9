"""A moving average of each batch's range of least error."""

from __future__ import annotations

import torch
from torch import Tensor

from bitwright.core.formats import Format
from bitwright.quantizers.observers.ema_minmax import EmaMinMax
from bitwright.quantizers.observers.mse import Mse


class EmaMse(EmaMinMax):
    """`mse` on each batch alone, then `ema-minmax` over the ranges."""

    def __init__(self, *, format: Format, momentum: float = 0.9, p: float = 2.0) -> None:
        super().__init__(format=format, momentum=momentum)
        self.p = p
        Mse(format=format, p=p)  # says at once if p can't be

    def observe(self, rows: Tensor) -> None:
        """Move the averages."""
        batch = Mse(format=self.format, p=self.p)
        batch.observe(rows)
        super().observe(torch.stack(batch.range(), dim=1))
