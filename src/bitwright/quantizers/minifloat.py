"""Small floating-point formats (FP8, and the MX formats with blocks), simulated in float32."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from bitwright.core.formats import Format, MinifloatSpec
from bitwright.quantizers.grid import SMALLEST, ZEROS, Grid, check_small
from bitwright.quantizers.levels import NonUniformQuantizer
from bitwright.quantizers.rounding import with_gradient_of


class Minifloat(NonUniformQuantizer):
    """The nearest number of the format: ties to even, saturating. The gradient is 1 where nothing is clipped.

    FP8: x/s, where s maps the end of the observed range (dynamic: of the values) to the largest number. MX:
    s = 2^(⌊log2 max|x|⌋ − e) of each block of 32, with e the exponent of the largest number.
    """

    minifloats: ClassVar[bool] = True

    @classmethod
    def supports(cls, format: Format) -> bool:
        """Small floats, also with scales that are computed at run time."""
        return format.minifloat is not None

    def set_range(self, low: Tensor, high: Tensor, shape: torch.Size, values: Tensor | None = None) -> None:
        """Store the larger magnitude of the two ends."""
        numbers = self.spec.format.minifloat
        assert numbers is not None  # the base class rejects other formats
        end = torch.maximum(low.abs(), high.abs()).to(torch.float32)
        if not self.spec.format.is_mx:  # block scales are computed in each forward
            check_small(end / numbers.largest, end, site=self.site)
        end = torch.where(end == 0, ZEROS, end.clamp(min=SMALLEST * numbers.largest))
        end = self.layout.fold(end, shape)
        self.set_grid(Grid(end / self.qmax, torch.zeros_like(end), self.qmin, self.qmax))

    def quantize(self, x: Tensor) -> Tensor:
        """Round to the nearest number of the format."""
        numbers = self.spec.format.minifloat
        assert numbers is not None  # the base class rejects other formats
        fixed = x.detach()
        scale = self._block_scale(fixed, numbers) if self.spec.format.is_mx else self._scale(fixed, numbers)
        rounded = _nearest(fixed / scale, numbers) * scale
        inside = (fixed.abs() <= numbers.largest * scale).to(x.dtype)
        return with_gradient_of(rounded, x * inside)

    def _scale(self, x: Tensor, numbers: MinifloatSpec) -> Tensor:
        if self.spec.format.dynamic:
            rows = self.layout.rows(x)
            end = torch.maximum(rows.amax(dim=1), -rows.amin(dim=1))
            end = torch.where(end == 0, ZEROS, end.clamp(min=SMALLEST * numbers.largest))
            return self.layout.over(end / numbers.largest, x)
        return self.layout.spread(self.end() / numbers.largest, x)

    def _block_scale(self, x: Tensor, numbers: MinifloatSpec) -> Tensor:
        largest = self.layout.rows(x).abs().amax(dim=1)
        exponent = torch.frexp(largest)[1] - torch.frexp(torch.tensor(numbers.largest))[1]
        exponent = exponent.clamp(min=-126)  # the smallest normal scale
        return self.layout.over(torch.ldexp(torch.ones_like(largest), exponent), x)


def _nearest(x: Tensor, numbers: MinifloatSpec) -> Tensor:
    exponent = (torch.frexp(x)[1] - 1).clamp(min=numbers.lowest)
    step = torch.ldexp(torch.ones_like(x), exponent - numbers.fraction)
    return (torch.round(x / step) * step).clamp(-numbers.largest, numbers.largest)
