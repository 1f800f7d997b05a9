"""The range with the smallest quantization error, found by shrinking both ends in steps of one percent."""

from __future__ import annotations

import torch
from torch import Tensor

from bitwright.core.errors import BitwrightError
from bitwright.core.formats import Format
from bitwright.quantizers.grid import grid_from_range
from bitwright.quantizers.observers.base import HistogramObserver


class Mse(HistogramObserver):
    """Minimizes Σ|x̂ − x|^p over ranges α·[min, max], α = 1, 0.99, … 0.20 (p = 2, or 2.4 for longer tails).

    Above 10 bits, the rounding error is smaller than a histogram bin, so the full range is used.
    """

    def __init__(self, *, format: Format, p: float = 2.0) -> None:
        super().__init__(format=format)
        if p <= 0:
            raise BitwrightError("p must be positive", value=p, fix="2.0", code="invalid-options")
        self.p = p

    def range(self) -> tuple[Tensor, Tensor]:
        """The best of the ranges."""
        low, high = self.ends()
        if self.format.bits > 10:
            return low, high
        values, counts = self.samples()
        # Negative numbers at an unsigned symmetric site are reported by the quantizer, which knows the site.
        bottom = low if self.format.signed or not self.format.symmetric else low.clamp(min=0.0)
        best = torch.full_like(low, float("inf"), dtype=torch.float64)
        chosen = torch.ones_like(low)
        for percent in range(100, 19, -1):
            shrink = percent / 100
            error = self._error(values, counts, bottom * shrink, high * shrink)
            better = error < best
            best = torch.where(better, error, best)
            chosen = torch.where(better, torch.full_like(chosen, shrink), chosen)
        return low * chosen, high * chosen

    def _error(self, values: Tensor, counts: Tensor, low: Tensor, high: Tensor) -> Tensor:
        grid = grid_from_range(low, high, self.format)
        scale, zero_point = grid.scale[:, None], grid.zero_point[:, None]
        codes = torch.clamp(torch.round(values / scale) + zero_point, grid.qmin, grid.qmax)
        return (((codes - zero_point) * scale - values).abs().double().pow(self.p) * counts).sum(dim=1)
