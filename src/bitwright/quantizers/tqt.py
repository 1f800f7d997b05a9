"""TQT: a power-of-two threshold, trained in the log domain."""

from __future__ import annotations

import torch
from torch import Tensor

from bitwright.attach import Grid, Quantizer, round_to_grid, with_gradient_of


class Tqt(Quantizer):
    """s = 2^⌈log2 t⌉ / (p+1): ∂log2 t = s·ln 2·{n below; p above; round(x/s) − x/s inside}; ⌈·⌉ is straight-through.

    The scale is a power of two in any format, before and after every optimizer step.
    """

    learned = ("log2_threshold",)
    symmetric_only = True
    own_kernels = True
    log2_threshold: Tensor

    @torch.no_grad()
    def set_grid(self, grid: Grid) -> None:
        """The threshold from which this grid follows; a scale that is no power of two is raised to one."""
        super().set_grid(grid)
        self.keep("log2_threshold", torch.log2(grid.scale * (grid.qmax + 1)))

    def _scale(self) -> Tensor:
        exponent = with_gradient_of(torch.ceil(self.log2_threshold), self.log2_threshold)
        return torch.exp2(exponent) / (self.qmax + 1)

    def quantize(self, x: Tensor) -> Tensor:
        """Round to the grid of the threshold."""
        grid = Grid(self._scale(), self.zero_point, self.qmin, self.qmax)
        return round_to_grid(x, grid, self.layout, fused=self.compiled)

    def grid(self) -> Grid:
        """The grid of the threshold."""
        return Grid(self._scale().detach(), self.zero_point, self.qmin, self.qmax)
