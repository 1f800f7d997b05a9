"""APoT: levels are sums of powers of two, dense around zero."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bitwright.attach import Grid, with_gradient_of
from bitwright.quantizers.apot_levels import levels, nearest
from bitwright.quantizers.uneven import Uneven


class Apot(Uneven):
    """x̂ = α·nearest level of clip(x/α): ∂α = level − x/α inside, ±1 outside. `scale` is α. A sign costs one bit.

    α starts at 3 for weights, standardised first (per scale); for activations at the calibrated end, at most 6.
    """

    learned = ("scale",)

    def __init__(self, *args: Any, alpha: float | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.alpha = alpha if alpha is not None else 3.0 if self.weight else 6.0

    def set_grid(self, grid: Grid) -> None:
        """α is the upper end."""
        most = torch.full_like(grid.scale, self.alpha / grid.qmax)
        super().set_grid(replace(grid, scale=most if self.weight else torch.minimum(most, grid.scale)))

    def transform(self, x: Tensor) -> Tensor:
        """Standardise a weight; mean and deviation get no gradient."""
        return self.layout.standardised(x) if self.weight else x

    def quantize(self, x: Tensor) -> Tensor:
        """The nearest level."""
        signed, alpha = self.qmin < 0, self.layout.spread(with_gradient_of(self.end(), self.scale.abs()), x)
        share = torch.clamp(self.transform(x) / alpha, -1.0 if signed else 0.0, 1.0)
        return with_gradient_of(nearest(share.detach(), levels(self.spec.format.bits - signed)), share) * alpha
