"""LSQ: the scale is learned, with its gradient scaled by 1/√(M·p)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from bitwright.attach import Grid, Quantizer, round_to_grid, usable_scale, with_gradient_of


class Lsq(Quantizer):
    """Learned step size: ∂s = g·{n−z below; p−z above; (x̂−x)/s inside}, g = 1/√(M·p), M elements per scale.

    Where the format wants powers of two, every forward rounds the scale to one: training can't lose it.
    The published start, s = 2·mean|x|/√p, is the observer `lsq`.
    """

    learned: ClassVar[tuple[str, ...]] = ("scale",)
    lengths = ("scale",)
    own_kernels = True

    def quantize(self, x: Tensor, *, relu: bool = False) -> Tensor:
        """Round to the grid of the learned scale (and zero point, if that is learned too)."""
        factor = self.gradient_scale(x)
        grid, spread = self.grid_for(x), self.layout.spread
        zero_point = spread(with_gradient_of(grid.zero_point, self.zero_point, factor), x)
        if self.layout.granularity == "group":
            scale, learned = spread(with_gradient_of(grid.scale, self.scale.abs(), factor), x), None
        else:
            scale, learned = spread(grid.scale, x), self.scale
        ends = (self.qmin, self.qmax)
        return round_to_grid(
            x, scale, zero_point, *ends, learned=learned, factor=factor, relu=relu, fused=self.compiled
        )

    def quantize_relu(self, x: Tensor) -> Tensor:
        """In one pass."""
        return self.quantize(x, relu=True)

    def grid(self) -> Grid:
        """The grid with the scale as the arithmetic uses it."""
        scale = usable_scale(self.scale, pot=self.spec.format.pot)
        return Grid(scale, self.zero_point.detach(), self.qmin, self.qmax)
