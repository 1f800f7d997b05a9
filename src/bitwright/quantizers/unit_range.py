"""What quantizers share that squeeze numbers into a fixed range and round them there."""

from __future__ import annotations

import torch
from torch import Tensor

from bitwright.attach import Quantizer, round_to_grid, with_gradient_of


class UnitRange(Quantizer):
    """Rounds `transform(x)` to the grid of [−1, 1], or [0, 1] where nothing was negative; straight-through.

    The result has another size than what came: a norm behind the operator, or training, makes up for it.
    """

    balanced = True

    def set_range(self, low: Tensor, high: Tensor, shape: torch.Size, values: Tensor | None = None) -> None:
        """The range is fixed; only the sign of what was seen counts."""
        super().set_range(torch.where(low < 0, -1.0, 0.0), torch.ones_like(high), shape, values)

    def quantize(self, x: Tensor) -> Tensor:
        """Round; the gradient is that of the transformation."""
        x = self.transform(x)
        return with_gradient_of(round_to_grid(x.detach(), self.grid(), self.layout), x)
