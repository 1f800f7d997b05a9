"""Dynamic quantization: scales are computed at run time from the values themselves, per tensor or per token."""

from __future__ import annotations

import torch
from torch import Tensor

from bitwright.core.errors import UncalibratedError
from bitwright.core.formats import Format
from bitwright.quantizers.base import Quantizer
from bitwright.quantizers.grid import Grid, extremes, grid_from_range
from bitwright.quantizers.rounding import with_gradient_of


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
