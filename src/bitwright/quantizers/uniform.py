"""Quantizers with a uniform grid that isn't trained: plain rounding, dynamic scales, and DSQ."""

from __future__ import annotations

from math import log
from typing import Any

import torch
from torch import Tensor

from bitwright.core.errors import BitwrightError, UncalibratedError
from bitwright.core.formats import Format
from bitwright.quantizers.base import Quantizer
from bitwright.quantizers.grid import Grid, extremes, grid_from_range
from bitwright.quantizers.rounding import round_to_grid, with_gradient_of


class Plain(Quantizer):
    """x̂ = (clamp(round(x/s) + z, n, p) − z)·s, ∂x̂/∂x = 1 inside the range and 0 outside."""

    own_kernels = True
    signed_scales = True

    def quantize(self, x: Tensor, *, relu: bool = False) -> Tensor:
        """Round to the grid."""
        return round_to_grid(x, self.grid(), self.layout, relu=relu, half=True, fused=self.compiled)

    def quantize_relu(self, x: Tensor) -> Tensor:
        return self.quantize(x, relu=True)


class Dynamic(Quantizer):
    """Rounds to the grid of the range of each tensor or token. Nothing is clipped, so the gradient is 1.

    It has no state and needs no calibration.
    """

    @classmethod
    def supports(cls, format: Format) -> bool:
        """Integer formats with scales that are computed at run time."""
        return format.dynamic and format.minifloat is None

    def grid(self) -> Grid:
        """Raise an error, because the grid depends on the values."""
        raise UncalibratedError(
            "a dynamic site has no stored grid: its scales depend on each input",
            where=self.site,
            value=str(self.format),
            fix="use `grid_for(x)`, or a format without dynamic",
            code="dynamic-grid",
        )

    @torch.no_grad()
    def grid_for(self, x: Tensor) -> Grid:
        """The grid of these values."""
        low, high = extremes(self.layout.rows(x.detach().to(torch.float32)))
        grid = grid_from_range(low, high, self.spec.format)
        scale, zero_point = (self.layout.fold(per_row, x.shape) for per_row in (grid.scale, grid.zero_point))
        return Grid(scale, zero_point, grid.qmin, grid.qmax)

    def quantize(self, x: Tensor) -> Tensor:
        """Round to the grid of `x`."""
        if x.numel() == 0:
            return x
        with torch.no_grad():
            grid = self.grid_for(x)
            codes = torch.clamp(torch.round(x / grid.scale) + grid.zero_point, grid.qmin, grid.qmax)
            rounded = (codes - grid.zero_point) * grid.scale
        return with_gradient_of(rounded, x)


class Dsq(Quantizer):
    """u = clamp(x/s); φ = ⌊u⌋ + ½ + ½·k_s·tanh(k·(u − ⌊u⌋ − ½)); x̂ = round(φ)·s, ∂x̂/∂x = φ'(u).

    k_s = 1/(1 − α) and k = ln((k_s+1)/(k_s−1)) make φ continuous; for α → 0, φ becomes the hard staircase.
    """

    def __init__(self, *args: Any, alpha: float = 0.4, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not 0.0 < alpha < 1.0:
            raise BitwrightError(
                "alpha must be in (0, 1)", where=self.site, value=alpha, fix="0.4", code="invalid-options"
            )
        self.height = 1 / (1 - alpha)
        self.slope = log((self.height + 1) / (self.height - 1))

    def soft(self, steps: Tensor) -> Tensor:
        """φ: equals the identity at integers and is steep between them."""
        floor = torch.floor(steps).detach()
        return floor + 0.5 + 0.5 * self.height * torch.tanh(self.slope * (steps - floor - 0.5))

    def quantize(self, x: Tensor) -> Tensor:
        """Round the soft staircase."""
        scale, zero_point = self.layout.spread(self.scale, x), self.layout.spread(self.zero_point, x)
        soft = self.soft(torch.clamp(x / scale, self.qmin - zero_point, self.qmax - zero_point))
        return with_gradient_of(torch.round(soft), soft) * scale
