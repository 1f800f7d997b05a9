"""The power-of-two scale of least error, from the one that covers everything downwards.

"Floor" is that of the fractional bits, −log2 s: the first scale that is tried clips nothing.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from bitwright.core.formats import Format
from bitwright.quantizers.grid import grid_from_range
from bitwright.quantizers.observers.histogram import HistogramObserver
from bitwright.quantizers.observers.moments import range_of_scale, unless_too_small, unless_zeros

_TRIED = 5  # exponents


def best_exponent(values: Tensor, counts: Tensor, low: Tensor, high: Tensor, format: Format) -> Tensor:
    """The e per row, ⌈log2 s⌉ … ⌈log2 s⌉ − 4, whose scale 2^e has the least squared error; s covers everything."""
    # Negative numbers at an unsigned symmetric site are reported by the quantizer, which knows the site.
    low = low if format.signed or not format.symmetric else low.clamp(min=0.0)
    fraction, exponents = torch.frexp(grid_from_range(low, high, replace(format, pot=False)).scale)
    top = (exponents - (fraction == 0.5).to(exponents.dtype)).to(low.dtype)  # ⌈log2 s⌉, exact
    best, chosen = torch.full_like(top, float("inf"), dtype=torch.float64), top
    for exponent in (top, *(top - down for down in range(1, _TRIED))):
        bottom, end = range_of_scale(torch.exp2(exponent), low, format)
        grid = grid_from_range(bottom, end, format)
        scale, zero_point = grid.scale[:, None], grid.zero_point[:, None]
        codes = torch.clamp(torch.round(values / scale) + zero_point, grid.qmin, grid.qmax)
        error = (((codes - zero_point) * scale - values).double().square() * counts).sum(dim=1)
        if exponent is top:  # where this range exceeds float32, smaller ones that clip it are no answer
            fits = bottom.isfinite() & end.isfinite()
            best = torch.where(fits, best, float("-inf"))
        better = error < best
        chosen, best = torch.where(better, exponent, chosen), torch.where(better, error, best)
    return chosen


class PotFloor(HistogramObserver):
    """s = 2^e with the best e over everything that was seen."""

    def range(self) -> tuple[Tensor, Tensor]:
        """The range of that scale."""
        low, high = self.ends()
        exponent = best_exponent(*self.samples(), low, high, self.format)
        ends = range_of_scale(torch.exp2(exponent), low, self.format)
        return unless_zeros(unless_too_small(ends, low, high, self.format), low, high)
