"""QIL: a learned interval. Values below it are pruned, values above it are clipped."""

from __future__ import annotations

import torch
from torch import Tensor

from bitwright.quantizers.grid import SMALLEST, grid_from_range
from bitwright.quantizers.levels import UnitRangeQuantizer
from bitwright.quantizers.rounding import with_gradient_of


class Qil(UnitRangeQuantizer):
    """t = clip(½·|x|/D − ½·C/D + ½, 0, 1)·sign x (centre C, half-width D; γ = 1), rounded to p steps of 1/p.

    C and D have LSQ's gradient scale. A weight is exported as t. A Q/DQ pair can't compute t of an activation.
    """

    learned = ("centre", "half_width")
    symmetric_only = True
    centre: Tensor
    half_width: Tensor
    exportable = property(lambda self: self.weight)

    @torch.no_grad()
    def set_range(self, low: Tensor, high: Tensor, shape: torch.Size, values: Tensor | None = None) -> None:
        """Start with the interval [0, largest], which prunes nothing."""
        grid = grid_from_range(low, high, self.spec.format, site=self.site)
        for name in self.learned:
            self.keep(name, self.layout.fold(grid.scale * grid.qmax / 2, shape))
        super().set_range(low, high, shape, values)

    def invalid_state(self) -> str | None:
        """An empty interval."""
        return "half_width" if bool((self.half_width == 0).any()) else None

    def squeeze(self, x: Tensor) -> Tensor:
        """t: the position of |x| in the interval."""
        factor, spread = self.gradient_scale(x), self.layout.spread
        width = self.half_width.abs().clamp(min=SMALLEST)
        centre, width = (spread(with_gradient_of(part, part, factor), x) for part in (self.centre, width))
        return torch.clamp(0.5 * (x.abs() - centre) / width + 0.5, 0.0, 1.0) * torch.sign(x)
