"""APoT: levels are sums of powers of two, dense around zero."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import Tensor

from bitwright.attach import Grid, Quantizer, usable_scale, with_gradient_of


def levels(bits: int) -> list[float]:
    """The 2^bits levels in [0, 1]: each two bits choose 0 or one of three powers; an odd bit, 0 or one power."""
    pairs = bits // 2
    third = 2 * pairs + bits % 2
    terms = [[0.0, 2.0**-j, 2.0 ** -(j + pairs), 2.0 ** -(j + third)] for j in range(1, pairs + 1)]
    if bits % 2:
        terms.append([0.0, 2.0**-third])
    sums = sorted({sum(chosen) for chosen in product(*terms)})
    return [value / sums[-1] for value in sums]


class Apot(Quantizer):
    """x̂ = α·nearest level of clip(x/α): ∂α = level − x/α inside, ±1 outside. `scale` is α.

    α starts at 3 for weights, which are standardised first (per scale), and for activations at the end of the
    calibrated range, at most 6. A sign costs one bit. No Q/DQ pair has these levels.
    """

    learned = ("scale",)
    exportable = False
    symmetric_only = True

    def __init__(self, *args: Any, alpha: float | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.alpha = alpha if alpha is not None else 3.0 if self.weight else 6.0

    def set_grid(self, grid: Grid) -> None:
        """α is the upper end."""
        alpha = torch.full_like(grid.scale, self.alpha)
        alpha = alpha if self.weight else torch.minimum(alpha, grid.scale * grid.qmax)
        super().set_grid(Grid(alpha, grid.zero_point, grid.qmin, grid.qmax))

    def transform(self, x: Tensor) -> Tensor:
        """Standardise a weight; mean and deviation get no gradient."""
        if not self.weight:
            return x
        rows = self.layout.rows(x.detach())
        std, mean = torch.std_mean(rows, dim=1, correction=0)
        std, mean = (self.layout.spread(self.layout.fold(part, x.shape), x) for part in (std.clamp(min=1e-12), mean))
        return (x - mean) / std

    def quantize(self, x: Tensor) -> Tensor:
        """The nearest level."""
        scale = with_gradient_of(usable_scale(self.scale, pot=self.spec.format.pot), self.scale.abs())
        alpha = self.layout.spread(scale, x)
        share = torch.clamp(self.transform(x) / alpha, -1.0 if self.qmin < 0 else 0.0, 1.0)
        known = torch.tensor(levels(self.spec.format.bits - (self.qmin < 0)), device=x.device)
        nearest = known[torch.bucketize(share.detach().abs(), (known[1:] + known[:-1]) / 2)]
        return with_gradient_of(nearest * torch.sign(share.detach()), share) * alpha

    def grid(self) -> Grid:
        """A uniform grid over the same span, for reports."""
        scale = usable_scale(self.scale, pot=self.spec.format.pot) / self.qmax
        return Grid(scale, self.zero_point, self.qmin, self.qmax)
