"""LSQ: the scale is learned, with its gradient scaled by 1/√(M·p)."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor, nn

from bitwright.attach import Grid, Quantizer
from bitwright.attach.grid import EPS


def _with_gradient_of(value: Tensor, x: Tensor, factor: float = 1.0) -> Tensor:
    """`value`, to the last bit, with `factor` times the gradient of `x`."""
    return value.detach() + (x - x.detach()) * factor


class Lsq(Quantizer):
    """Learned step size: ∂s = g·{n−z below; p−z above; (x̂−x)/s inside}, g = 1/√(M·p), M elements per scale.

    Where the format wants powers of two, every forward rounds the scale to one: training can't lose it.
    """

    def _keep_scale(self, scale: Tensor) -> None:
        if "scale" in self._parameters and self.scale.shape == scale.shape:
            self.scale.data.copy_(scale)
        else:
            self.scale = nn.Parameter(scale)

    def quantize(self, x: Tensor) -> Tensor:
        """Round to the grid of the learned scale."""
        factor = 1.0 / sqrt(x.numel() / self.scale.numel() * self.qmax)
        scale = self.layout.spread(_with_gradient_of(self._step(), self.scale.abs(), factor), x)
        zero_point = self.layout.spread(self.zero_point, x)
        steps = torch.clamp(x / scale, self.qmin - zero_point, self.qmax - zero_point)
        return _with_gradient_of(torch.round(steps), steps) * scale

    def _step(self) -> Tensor:
        scale = torch.clamp(self.scale.detach().abs(), min=EPS)
        return torch.exp2(torch.round(torch.log2(scale))) if self.spec.format.pot else scale

    def grid(self) -> Grid:
        """The grid with the scale as the arithmetic uses it."""
        return Grid(self._step(), self.zero_point.detach(), self.qmin, self.qmax)
