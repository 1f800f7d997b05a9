"""TQT: a power-of-two threshold, trained in the log domain."""

from __future__ import annotations

from math import log2

import torch
from torch import Tensor

from bitwright.core.errors import CalibrationError
from bitwright.quantizers.base import Quantizer
from bitwright.quantizers.grid import Grid
from bitwright.quantizers.rounding import round_to_grid, with_gradient_of

_LOWEST, _HIGHEST = -126.0, 127.0  # exponents of the normal numbers of float32


class Tqt(Quantizer):
    """s = 2^⌈log2 t⌉ / (p+1): ∂log2 t = s·ln 2·{n below; p above; round(x/s) − x/s inside}; ⌈·⌉ is straight-through.

    The scale is always a power of two, in any format.
    """

    learned = ("log2_threshold",)
    symmetric_only = True
    own_kernels = True
    log2_threshold: Tensor

    @torch.no_grad()
    def set_grid(self, grid: Grid) -> None:
        """Set the threshold that gives this grid. The scale is rounded up to a power of two."""
        super().set_grid(grid)
        fraction, exponent = torch.frexp(grid.scale)
        ceiling = exponent - (fraction == 0.5).to(exponent.dtype) + log2(grid.qmax + 1)
        if bool((ceiling > _HIGHEST).any()):
            raise CalibrationError(
                "these values are too large: their power-of-two threshold exceeds float32",
                where=self.site,
                value=float(grid.scale.max()),
                code="scale-overflow",
                fix="divide the data or the weights by a power of two, or keep this site in float (format: float)",
            )
        threshold = torch.log2(grid.scale * (grid.qmax + 1))
        # for large exponents, float32 can't distinguish the logarithms of a power of two and of the next number
        self.keep("log2_threshold", torch.where(torch.ceil(threshold) == ceiling, threshold, ceiling))

    def _scale(self) -> Tensor:
        levels = log2(self.qmax + 1)
        exponent = torch.ceil(self.log2_threshold).clamp(_LOWEST + levels, _HIGHEST) - levels
        return torch.exp2(with_gradient_of(exponent, self.log2_threshold))

    def invalid_state(self) -> str | None:
        """Thresholds with a scale that isn't a normal number."""
        exponent = torch.ceil(self.log2_threshold)
        fits = (exponent >= _LOWEST + log2(self.qmax + 1)) & (exponent <= _HIGHEST)
        return None if bool(fits.all()) else "log2_threshold"

    def quantize(self, x: Tensor) -> Tensor:
        """Round to the grid of the threshold."""
        grid = Grid(self._scale(), self.zero_point, self.qmin, self.qmax)
        return round_to_grid(x, grid, self.layout, fused=self.compiled)

    def grid(self) -> Grid:
        """The grid of the threshold."""
        return Grid(self._scale().detach(), self.zero_point, self.qmin, self.qmax)
