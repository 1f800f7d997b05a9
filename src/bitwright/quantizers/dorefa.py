"""DoReFa: weights squeezed by tanh into [−1, 1], activations clipped to [0, 1] or [−1, 1]; nothing is learned."""

from __future__ import annotations

import torch
from torch import Tensor

from bitwright.quantizers.grid import SMALLEST
from bitwright.quantizers.levels import UnitRange


class DoReFa(UnitRange):
    """w̃ = tanh(w)/max|tanh(w)| rounded to the grid of [−1, 1], straight-through."""

    def squeeze(self, x: Tensor) -> Tensor:
        """Squeeze a weight, clip an activation."""
        if not self.weight:
            scale, zero_point = self.layout.spread(self.scale, x), self.layout.spread(self.zero_point, x)
            return torch.clamp(x, (self.qmin - zero_point) * scale, (self.qmax - zero_point) * scale)
        squeezed = torch.tanh(x)
        largest = self.layout.rows(squeezed).abs().amax(dim=1).clamp(min=SMALLEST)  # a row of zeros stays zeros
        return squeezed / self.layout.over(largest, x)
