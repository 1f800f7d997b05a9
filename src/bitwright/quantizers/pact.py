"""PACT: the ends of the range are learned from what they clip."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitwright.attach import round_to_grid, with_gradient_of
from bitwright.quantizers.learned_range import LearnedRange


class Pact(LearnedRange):
    """Clip to [0 or −α, α] (asymmetric: [low, α]), then round: ∂α = 1 above, −1 below (symmetric), 0 inside.

    α, kept as `high`, starts at the calibrated end of the range, at most `alpha`. Weights go with DoReFa.
    """

    weight_partner = "dorefa"

    def __init__(self, *args: Any, alpha: float = 6.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.alpha = alpha

    def set_range(self, low: Tensor, high: Tensor, shape: torch.Size, values: Tensor | None = None) -> None:
        """Start with at most α."""
        super().set_range(low.clamp(min=-self.alpha), high.clamp(max=self.alpha), shape, values)

    def quantize(self, x: Tensor) -> Tensor:
        """Round to the grid between the ends; the gradient is that of the clipping."""
        low, high = (self.layout.spread(end, x) for end in self.ends())
        return with_gradient_of(round_to_grid(x.detach(), self.grid(), self.layout), torch.clamp(x, low, high))
