"""A moving average of each batch's range with the smallest error."""

from __future__ import annotations

import torch
from torch import Tensor

from bitwright.core.formats import Format
from bitwright.quantizers.observers.ema_minmax import EmaMinMax
from bitwright.quantizers.observers.mse import Mse


class EmaMse(EmaMinMax):
    """Applies `mse` to each batch, then `ema-minmax` to the ranges."""

    def __init__(self, *, format: Format, momentum: float = 0.9, p: float = 2.0) -> None:
        super().__init__(format=format, momentum=momentum)
        self.p = p
        Mse(format=format, p=p)  # validates p

    def observe(self, rows: Tensor) -> None:
        """Update the averages."""
        batch = Mse(format=self.format, p=self.p)
        batch.observe(rows)
        super().observe(torch.stack(batch.range(), dim=1))
