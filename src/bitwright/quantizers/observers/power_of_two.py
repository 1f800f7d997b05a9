"""Power-of-two scales with the smallest error."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from bitwright.core.formats import Format
from bitwright.quantizers.grid import extremes, grid_from_range
from bitwright.quantizers.observers.base import (
    HistogramObserver,
    RangeObserver,
    empty_if_zeros,
    observed_if_too_small,
    range_of_scale,
)

_TRIED = 5  # number of exponents


def best_exponent(values: Tensor, counts: Tensor, low: Tensor, high: Tensor, format: Format) -> Tensor:
    """The exponent e per row, from ⌈log2 s⌉ to ⌈log2 s⌉ − 4, with the smallest squared error. s covers all values."""
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
        if exponent is top:  # if this range exceeds float32, don't use smaller ones that clip
            fits = bottom.isfinite() & end.isfinite()
            best = torch.where(fits, best, float("-inf"))
        better = error < best
        chosen, best = torch.where(better, exponent, chosen), torch.where(better, error, best)
    return chosen


class PotFloor(HistogramObserver):
    """s = 2^e with the best e over all observed values."""

    def range(self) -> tuple[Tensor, Tensor]:
        low, high = self.ends()
        exponent = best_exponent(*self.samples(), low, high, self.format)
        ends = range_of_scale(torch.exp2(exponent), low, self.format)
        return empty_if_zeros(observed_if_too_small(ends, low, high, self.format), low, high)


class PotMode(RangeObserver):
    """Each batch votes for an exponent. The majority wins; ties are resolved in favour of the wider range."""

    def __init__(self, *, format: Format) -> None:
        super().__init__(format=format)
        self.votes: list[Tensor] = []

    def observe(self, rows: Tensor) -> None:
        super().observe(rows)
        low, high = extremes(rows)
        ones = torch.ones_like(rows, dtype=torch.float64)
        self.votes.append(best_exponent(rows, ones, low, high, self.format))

    def range(self) -> tuple[Tensor, Tensor]:
        """The range of the winning scale."""
        low, high = self.ends()
        finest = (-torch.stack(self.votes)).mode(dim=0).values  # for ties, `mode` returns the lowest
        ends = range_of_scale(torch.exp2(-finest), low, self.format)
        return empty_if_zeros(observed_if_too_small(ends, low, high, self.format), low, high)
