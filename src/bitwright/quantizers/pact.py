"""PACT: the ends of the range are learned from what they clip."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitwright.attach import Grid, Quantizer, round_to_grid, usable_scale, with_gradient_of


class Pact(Quantizer):
    """Clip to [0 or −α, α] (asymmetric: [low, α]), then round: ∂α = 1 above, −1 below (symmetric), 0 inside.

    α starts at the calibrated end of the range, at most `alpha`. Weights go with DoReFa.
    """

    learned = ("high", "low")
    weight_partner = "dorefa"
    high: Tensor
    low: Tensor

    def __init__(self, *args: Any, alpha: float = 6.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.alpha = alpha

    def learns(self, name: str) -> bool:
        """Symmetric: only α; the lower end is −α, or 0 of an unsigned format."""
        return name in self.learned and not (name == "low" and self.spec.format.symmetric)

    def keep_more(self) -> None:
        """The ends."""
        self.keep("high", torch.ones(()))
        self.keep("low", torch.zeros(()))

    def set_range(self, low: Tensor, high: Tensor, shape: torch.Size, values: Tensor | None = None) -> None:
        """Start with at most α."""
        super().set_range(low.clamp(min=-self.alpha), high.clamp(max=self.alpha), shape, values)

    @torch.no_grad()
    def set_grid(self, grid: Grid) -> None:
        """The ends of this grid; a symmetric signed one is cut to ±α."""
        qmin = -grid.qmax if self.spec.format.symmetric and grid.qmin < 0 else grid.qmin
        super().set_grid(Grid(grid.scale, grid.zero_point, qmin, grid.qmax))
        self.keep("high", (grid.qmax - grid.zero_point) * grid.scale)
        self.keep("low", (qmin - grid.zero_point) * grid.scale)

    def quantize(self, x: Tensor) -> Tensor:
        """Round to the grid between the ends; the gradient is that of the clipping."""
        grid, spread = self.grid(), self.layout.spread
        low, high = ((code - grid.zero_point) * grid.scale for code in (grid.qmin, grid.qmax))
        if self.spec.format.symmetric:
            high = with_gradient_of(high, self.high.abs())
            low = -high if grid.qmin < 0 else low
        else:
            low = with_gradient_of(self.low.clamp(max=0.0), self.low)
            high = with_gradient_of(self.high.clamp(min=0.0), self.high)
        value = round_to_grid(x.detach(), spread(grid.scale, x), spread(grid.zero_point, x), grid.qmin, grid.qmax)
        return with_gradient_of(value, torch.clamp(x, spread(low, x), spread(high, x)))

    def grid(self) -> Grid:
        """The grid that the ends span now."""
        if self.spec.format.symmetric:
            scale = usable_scale(self.high / self.qmax, pot=self.spec.format.pot)
            return Grid(scale, torch.zeros_like(scale), self.qmin, self.qmax)
        low = self.low.detach().clamp(max=0.0)
        scale = usable_scale((self.high.detach().clamp(min=0.0) - low) / (self.qmax - self.qmin), pot=False)
        zero_point = torch.clamp(self.qmin - torch.round(low / scale), self.qmin, self.qmax)
        return Grid(scale, zero_point, self.qmin, self.qmax)
