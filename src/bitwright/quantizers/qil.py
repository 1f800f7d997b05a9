"""QIL: an interval is learned; what lies below it is pruned, what lies above is clipped."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

from bitwright.attach import Grid, Quantizer, grid_from_range, round_to_grid, with_gradient_of
from bitwright.attach.grid import EPS


class Qil(Quantizer):
    """t = clip(½·|x|/D − ½·C/D + ½, 0, 1)·sign x (centre C, half-width D; γ = 1), rounded to p steps of 1/p.

    C and D have LSQ's gradient scale. The result lies in [−1, 1]: a norm behind the operator, or training, makes
    up for its size. At a weight it is exported as t; no Q/DQ pair can compute t of an activation.
    """

    learned = ("centre", "half_width")
    symmetric_only = True
    centre: Tensor
    half_width: Tensor

    @property
    def exportable(self) -> bool:
        """Weights are."""
        return self.weight

    def keep_more(self) -> None:
        """The interval."""
        self.keep("centre", torch.ones(()))
        self.keep("half_width", torch.ones(()))

    @torch.no_grad()
    def set_range(self, low: Tensor, high: Tensor, shape: torch.Size, values: Tensor | None = None) -> None:
        """The interval starts as [0, largest]: nothing is pruned."""
        grid = grid_from_range(low, high, self.spec.format, site=self.site)
        for name in self.learned:
            self.keep(name, self.layout.fold(grid.scale * grid.qmax / 2, shape))
        super().set_range(torch.where(low < 0, -1.0, 0.0), torch.ones_like(high), shape, values)

    def set_grid(self, grid: Grid) -> None:
        """t is never below −1."""
        super().set_grid(Grid(grid.scale, grid.zero_point, min(0, max(grid.qmin, -grid.qmax)), grid.qmax))

    def transform(self, x: Tensor) -> Tensor:
        """t: where in the interval |x| lies."""
        factor = 1.0 / sqrt(x.numel() / self.centre.numel() * self.qmax)
        centre = self.layout.spread(with_gradient_of(self.centre, self.centre, factor), x)
        width = self.half_width.abs().clamp(min=EPS)
        width = self.layout.spread(with_gradient_of(width, width, factor), x)
        return torch.clamp(0.5 * (x.abs() - centre) / width + 0.5, 0.0, 1.0) * torch.sign(x)

    def quantize(self, x: Tensor) -> Tensor:
        """Round t."""
        scale = self.layout.spread(self.scale, x)
        t = self.transform(x)
        return with_gradient_of(round_to_grid(t.detach(), scale, torch.zeros_like(scale), self.qmin, self.qmax), t)
