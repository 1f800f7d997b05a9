"""NNIE: logarithmic levels, as used by a family of camera chips."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitwright.quantizers.grid import LARGEST, SMALLEST
from bitwright.quantizers.levels import NonUniformQuantizer
from bitwright.quantizers.rounding import with_gradient_of


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
