"""LSQ: the scale is learned, with its gradient scaled by 1/√(M·p)."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor, nn

from bitwright.attach import Grid, Quantizer
from bitwright.attach.grid import EPS


def _pass_round(x: Tensor) -> Tensor:
    return x + (torch.round(x) - x).detach()


class Lsq(Quantizer):
    """Learned step size: ∂s = g·{n−z below; p−z above; (x̂−x)/s inside}, g = 1/√(M·p), M elements per scale."""

    def _keep_scale(self, scale: Tensor) -> None:
        if "scale" in self._parameters and self.scale.shape == scale.shape:
            self.scale.data.copy_(scale)
        else:
            self.scale = nn.Parameter(scale)

    def quantize(self, x: Tensor) -> Tensor:
        """Round to the grid of the learned scale."""
        factor = 1.0 / sqrt(x.numel() / self.scale.numel() * self.qmax)
        positive = torch.clamp(self.scale.abs(), min=EPS)
        scale = self.layout.spread(positive * factor + (positive * (1.0 - factor)).detach(), x)
        zero_point = self.layout.spread(self.zero_point, x)
        steps = torch.clamp(x / scale, self.qmin - zero_point, self.qmax - zero_point)
        return _pass_round(steps) * scale

    def grid(self) -> Grid:
        """The grid with the scale as the arithmetic uses it."""
        scale = torch.clamp(self.scale.detach().abs(), min=EPS)
        return Grid(scale, self.zero_point.detach(), self.qmin, self.qmax)
