"""Quantizers with non-uniform levels: APoT, NNIE, and small floats.

APoT's levels are sums of powers of two and are dense around zero. NNIE's levels are logarithmic, as on a family of
camera chips. Small floats are FP8 and the MX formats with blocks, simulated in float32.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, ClassVar

import torch
from torch import Tensor

from bitwright.core.formats import Format, MinifloatSpec
from bitwright.quantizers.base import Quantizer
from bitwright.quantizers.grid import LARGEST, SMALLEST, ZEROS, Grid, check_small
from bitwright.quantizers.rounding import usable_scale, with_gradient_of
from bitwright.quantizers.unit_range import Sized, ratio


class NonUniformQuantizer(Quantizer):
    """A quantizer with non-uniform levels. `scale` is the upper end of the range. It can't be exported as Q/DQ pair."""

    exportable = False
    symmetric_only = True

    def set_grid(self, grid: Grid) -> None:
        super().set_grid(Grid(grid.scale * grid.qmax, grid.zero_point, grid.qmin, grid.qmax))

    def end(self) -> Tensor:
        """The upper end, without gradient: positive, and a power of two if the format requires it."""
        return usable_scale(self.scale, pot=self.spec.format.pot) if self.learns("scale") else self.scale.detach()

    def grid(self) -> Grid:
        """A uniform grid over the same range, for reports."""
        return Grid(self.end() / self.qmax, self.zero_point, self.qmin, self.qmax)


def levels(bits: int) -> list[float]:
    """The 2^bits levels in [0, 1]. Each pair of bits selects 0 or one of three powers, a single bit 0 or one power."""
    pairs = bits // 2
    third = 2 * pairs + bits % 2
    terms = [[0.0, 2.0**-j, 2.0 ** -(j + pairs), 2.0 ** -(j + third)] for j in range(1, pairs + 1)]
    if bits % 2:
        terms.append([0.0, 2.0**-third])
    sums = sorted({sum(chosen) for chosen in product(*terms)})
    return [value / sums[-1] for value in sums]


def nearest(x: Tensor, levels: list[float]) -> Tensor:
    """The nearest value in [−1, 1] among the levels and their negatives."""
    known = torch.tensor(levels, device=x.device)
    return known[torch.bucketize(x.abs(), (known[1:] + known[:-1]) / 2)] * torch.sign(x)


class Apot(NonUniformQuantizer, Sized):
    """x̂ = α·nearest level of clip(x/α): ∂α = level − x/α inside, ±1 outside. `scale` is α. The sign takes one bit.

    For weights, which are standardized first (per scale), α starts at 3. For activations it starts at the calibrated
    end of the range, at most 6.
    """

    learned = ("scale",)

    def __init__(self, *args: Any, alpha: float | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.alpha = alpha if alpha is not None else 3.0 if self.weight else 6.0

    def set_grid(self, grid: Grid) -> None:
        """Use the upper end of the grid as α."""
        most = torch.full_like(grid.scale, self.alpha / grid.qmax)
        super().set_grid(replace(grid, scale=most if self.weight else torch.minimum(most, grid.scale)))

    def transform(self, x: Tensor) -> Tensor:
        """Standardize a weight. Mean and deviation get no gradient."""
        return self.layout.standardised(x) if self.weight else x

    def quantize(self, x: Tensor) -> Tensor:
        """Round to the nearest level."""
        signed, alpha = self.qmin < 0, self.layout.spread(with_gradient_of(self.end(), self.scale.abs()), x)
        share = torch.clamp(self.transform(x) / alpha, -1.0 if signed else 0.0, 1.0)
        known = levels(self.spec.format.bits - signed)
        if self.preserves_magnitude:
            return self._sized(self.with_magnitude_of(share, x), x, known)
        return with_gradient_of(nearest(share.detach(), known), share) * alpha

    def _sized(self, values: Tensor, x: Tensor, known: list[float]) -> Tensor:
        """Round to levels that give the result the magnitude of `x`. A power of two can't match it exactly."""
        pot, rows = self.spec.format.pot, self.layout.rows(values.detach())
        end = usable_scale(rows.abs().amax(dim=1), pot=pot)
        near = nearest(torch.clamp(values.detach() / self.layout.over(end, x), -1.0, 1.0), known)
        near = near * self.layout.over(end if pot else ratio(x.detach(), near, self.layout), x)
        return with_gradient_of(near, values)


class Nnie(NonUniformQuantizer):
    """±2^((clamp(round(k·log2|x|) − z, 0⁺ or 1⁻, q) + z)/k), z = round(k·log2 c) − q, with an identity gradient.

    8 bits: k = 16 levels per octave, q = 127, as on the chip; other widths keep the octaves (k = 2^(B−4)). Values more
    than an octave below the lowest level become 0. `scale` is c, the largest value.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.per_octave = 2.0 ** (self.spec.format.bits - 4)
        self.highest = 2 ** (self.spec.format.bits - 1) - 1

    def quantize(self, x: Tensor) -> Tensor:
        """The nearest level in the log domain."""
        z = self.layout.spread(torch.round(self.per_octave * torch.log2(self.scale)) - self.highest, x)
        lowest = (x.detach() < 0).to(x.dtype)  # code 0 of negative numbers represents zero
        exponent = torch.round(self.per_octave * torch.log2(x.detach().abs().clamp(min=SMALLEST)) - z)
        level = torch.exp2((torch.maximum(exponent, lowest).clamp(max=self.highest) + z) / self.per_octave)
        alive = x.detach().abs() > torch.exp2((z + lowest) / self.per_octave - 1)
        return with_gradient_of(torch.where(alive, level.clamp(max=LARGEST) * torch.sign(x.detach()), 0.0), x)


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
