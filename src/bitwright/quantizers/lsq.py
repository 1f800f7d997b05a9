"""LSQ and LSQ+: the scale is learned, with its gradient scaled by 1/√(M·p); LSQ+ also learns the zero point."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from bitwright.quantizers.base import Quantizer
from bitwright.quantizers.grid import Grid
from bitwright.quantizers.rounding import can_fold, round_folded, round_to_grid, usable_scale, with_gradient_of


class Lsq(Quantizer):
    """Learned step size: ∂s = g·{n−z below; p−z above; (x̂−x)/s inside}, g = 1/√(M·p), M elements per scale.

    If the format requires powers of two, every forward rounds the scale to one.
    The observer `lsq` gives the published initial value, s = 2·mean|x|/√p.
    """

    learned = ("scale",)
    lengths = ("scale",)
    own_kernels = True
    signed_scales = True

    def quantize(self, x: Tensor, *, relu: bool = False) -> Tensor:
        """Round to the grid of the learned scale (and zero point, if it is learned)."""
        grid, factor = self.grid_for(x), self.gradient_scale(x)
        grid = replace(grid, zero_point=with_gradient_of(grid.zero_point, self.zero_point, factor))
        if self.spec.format.full:  # the gradient of the scale itself, not of its magnitude
            grid = replace(grid, scale=with_gradient_of(grid.scale, self.scale, factor))
            return round_to_grid(x, grid, self.layout, relu=relu)
        return round_to_grid(x, grid, self.layout, learned=self.scale, factor=factor, relu=relu, fused=self.compiled)

    def quantize_relu(self, x: Tensor) -> Tensor:
        return self.quantize(x, relu=True)

    def quantize_folded(self, weight: Tensor, factor: Tensor) -> Tensor | None:
        return round_folded(self, weight, factor) if can_fold(self, weight) else None

    def grid(self) -> Grid:
        """The grid with the effective scale."""
        scale = usable_scale(self.scale, pot=self.spec.format.pot, signed=self.spec.format.full)
        return Grid(scale, self.zero_point.detach(), self.qmin, self.qmax)


class LsqPlus(Lsq):
    """LSQ with ∂z = g·{−s where clipped; 0 inside}. A symmetric format has no zero point to learn.

    The parameter is a real number. Every forward and the artefact round it to an integer code.
    The observer `lsqplus` gives the published initial value, from |μ ± 3σ|.
    """

    learned_if_asymmetric = ("zero_point",)

    def invalid_state(self) -> str | None:
        """A zero point far from all codes. Training moves it only slightly beyond them."""
        most = self.qmax - self.qmin
        far = (self.zero_point < self.qmin - most) | (self.zero_point > self.qmax + most)
        return "zero_point" if bool(far.any()) else None

    def grid(self) -> Grid:
        """The grid with the zero point rounded to a code."""
        grid = super().grid()
        zero_point = torch.clamp(torch.round(grid.zero_point), grid.qmin, grid.qmax)
        return Grid(grid.scale, zero_point, grid.qmin, grid.qmax)
