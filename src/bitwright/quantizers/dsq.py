"""DSQ: a soft staircase approximates rounding, and its slope is the gradient."""

from __future__ import annotations

from math import log
from typing import Any

import torch
from torch import Tensor

from bitwright.core.errors import BitwrightError
from bitwright.quantizers.base import Quantizer
from bitwright.quantizers.rounding import with_gradient_of


class Dsq(Quantizer):
    """u = clamp(x/s); φ = ⌊u⌋ + ½ + ½·k_s·tanh(k·(u − ⌊u⌋ − ½)); x̂ = round(φ)·s, ∂x̂/∂x = φ'(u).

    k_s = 1/(1 − α) and k = ln((k_s+1)/(k_s−1)) make φ continuous; for α → 0, φ becomes the hard staircase.
    """

    def __init__(self, *args: Any, alpha: float = 0.4, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not 0.0 < alpha < 1.0:
            raise BitwrightError(
                "alpha must be in (0, 1)", where=self.site, value=alpha, fix="0.4", code="invalid-options"
            )
        self.height = 1 / (1 - alpha)
        self.slope = log((self.height + 1) / (self.height - 1))

    def soft(self, steps: Tensor) -> Tensor:
        """φ: equals the identity at integers and is steep between them."""
        floor = torch.floor(steps).detach()
        return floor + 0.5 + 0.5 * self.height * torch.tanh(self.slope * (steps - floor - 0.5))

    def quantize(self, x: Tensor) -> Tensor:
        """Round the soft staircase."""
        scale, zero_point = self.layout.spread(self.scale, x), self.layout.spread(self.zero_point, x)
        soft = self.soft(torch.clamp(x / scale, self.qmin - zero_point, self.qmax - zero_point))
        return with_gradient_of(torch.round(soft), soft) * scale
