"""PACT: the ends of the range are learned from the gradients of clipped values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitwright.quantizers.base import Quantizer
from bitwright.quantizers.grid import Grid, scale_of
from bitwright.quantizers.rounding import round_to_grid, usable_scale, with_gradient_of


class LearnedRange(Quantizer):
    """Learns `high` and `low`, which define the grid. A symmetric range is ±|high|, or [0, |high|]."""

    learned = ("high",)
    learned_if_asymmetric = ("low",)
    lengths = ("high", "low")
    balanced = True
    high: Tensor
    low: Tensor

    @torch.no_grad()
    def set_grid(self, grid: Grid) -> None:
        """Use the ends of this grid."""
        super().set_grid(grid)
        self.keep("high", (self.qmax - grid.zero_point) * grid.scale)
        self.keep("low", (self.qmin - grid.zero_point) * grid.scale)

    def ends(self) -> tuple[Tensor, Tensor]:
        """The effective ends with the gradients of the learned ones. They always include zero."""
        if not self.spec.format.symmetric:
            low = with_gradient_of(self.low.clamp(max=0.0), self.low)
            return low, with_gradient_of(self.high.clamp(min=0.0), self.high)
        high = with_gradient_of(self.grid().scale * self.qmax, self.high.abs())
        return (-high if self.qmin < 0 else torch.zeros_like(high)), high

    def invalid_state(self) -> str | None:
        """An empty range."""
        if self.spec.format.symmetric:
            return "high" if bool((self.high == 0).any()) else None
        low, high = (end.detach() for end in self.ends())
        return "high" if bool((high == low).any()) else None

    def grid(self) -> Grid:
        """The grid between the current ends."""
        if self.spec.format.symmetric:
            scale = usable_scale(self.high / self.qmax, pot=self.spec.format.pot)
            return Grid(scale, torch.zeros_like(scale), self.qmin, self.qmax)
        low, high = (end.detach() for end in self.ends())
        scale = usable_scale(scale_of(low, high, self.qmax - self.qmin), pot=False)
        zero_point = torch.clamp(self.qmin - torch.round(low / scale), self.qmin, self.qmax)
        return Grid(scale, zero_point, self.qmin, self.qmax)


class Pact(LearnedRange):
    """Clip to [0 or −α, α] (asymmetric: [low, α]), then round: ∂α = 1 above, −1 below (symmetric), 0 inside.

    α, stored as `high`, starts at the calibrated end of the range, at most `alpha`. Weights use DoReFa.
    """

    weight_partner = "dorefa"

    def __init__(self, *args: Any, alpha: float = 6.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.alpha = alpha

    def set_range(self, low: Tensor, high: Tensor, shape: torch.Size, values: Tensor | None = None) -> None:
        """Start with at most α."""
        super().set_range(low.clamp(min=-self.alpha), high.clamp(max=self.alpha), shape, values)

    def quantize(self, x: Tensor) -> Tensor:
        """Round to the grid between the ends, with the gradient of clipping."""
        low, high = (self.layout.spread(end, x) for end in self.ends())
        return with_gradient_of(round_to_grid(x.detach(), self.grid(), self.layout), torch.clamp(x, low, high))
