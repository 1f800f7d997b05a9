"""What quantizers share that learn the ends of their range, not its scale."""

from __future__ import annotations

import torch
from torch import Tensor

from bitwright.attach import Grid, Quantizer, usable_scale, with_gradient_of
from bitwright.attach.grid import scale_of


class LearnedRange(Quantizer):
    """Keeps `high` and `low`; the grid follows from them. A symmetric range is ±|high|, or [0, |high|]."""

    learned = ("high",)
    learned_if_asymmetric = ("low",)
    lengths = ("high", "low")
    balanced = True
    high: Tensor
    low: Tensor

    @torch.no_grad()
    def set_grid(self, grid: Grid) -> None:
        """The ends of this grid."""
        super().set_grid(grid)
        self.keep("high", (self.qmax - grid.zero_point) * grid.scale)
        self.keep("low", (self.qmin - grid.zero_point) * grid.scale)

    def ends(self) -> tuple[Tensor, Tensor]:
        """The ends in force, with the gradients of what is learned; zero always lies between them."""
        if not self.spec.format.symmetric:
            low = with_gradient_of(self.low.clamp(max=0.0), self.low)
            return low, with_gradient_of(self.high.clamp(min=0.0), self.high)
        high = with_gradient_of(self.grid().scale * self.qmax, self.high.abs())
        return (-high if self.qmin < 0 else torch.zeros_like(high)), high

    def odd_state(self) -> str | None:
        """Ends without a range between them."""
        if self.spec.format.symmetric:
            return "high" if bool((self.high == 0).any()) else None
        low, high = (end.detach() for end in self.ends())
        return "high" if bool((high == low).any()) else None

    def grid(self) -> Grid:
        """The grid that the ends span now."""
        if self.spec.format.symmetric:
            scale = usable_scale(self.high / self.qmax, pot=self.spec.format.pot)
            return Grid(scale, torch.zeros_like(scale), self.qmin, self.qmax)
        low, high = (end.detach() for end in self.ends())
        scale = usable_scale(scale_of(low, high, self.qmax - self.qmin), pot=False)
        zero_point = torch.clamp(self.qmin - torch.round(low / scale), self.qmin, self.qmax)
        return Grid(scale, zero_point, self.qmin, self.qmax)
