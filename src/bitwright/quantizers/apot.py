"""APoT: levels are sums of powers of two and are dense around zero."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from bitwright.quantizers.grid import Grid
from bitwright.quantizers.levels import NonUniformQuantizer, Sized, ratio
from bitwright.quantizers.rounding import usable_scale, with_gradient_of


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
