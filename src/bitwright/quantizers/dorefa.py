"""DoReFa: weights are mapped to [−1, 1] by tanh, activations are clipped to [0, 1] or [−1, 1]; nothing is learned."""

from __future__ import annotations

import torch
from torch import Tensor

from bitwright.quantizers.grid import SMALLEST
from bitwright.quantizers.levels import UnitRangeQuantizer


class DoReFa(UnitRangeQuantizer):
    """w̃ = tanh(w)/max|tanh(w)| rounded to the grid of [−1, 1], with a straight-through gradient."""

    def squeeze(self, x: Tensor) -> Tensor:
        """Map a weight by tanh, or clip an activation."""
        if not self.weight:
            scale, zero_point = self.layout.spread(self.scale, x), self.layout.spread(self.zero_point, x)
            return torch.clamp(x, (self.qmin - zero_point) * scale, (self.qmax - zero_point) * scale)
        squeezed = torch.tanh(x)
        largest = self.layout.rows(squeezed).abs().amax(dim=1).clamp(min=SMALLEST)  # keeps a row of zeros
        return squeezed / self.layout.over(largest, x)
