"""The range that LSQ starts from."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

from bitwright.quantizers.observers.moments import MomentsObserver, range_of_scale, settled


class LsqStart(MomentsObserver):
    """s = 2·mean|x|/√p over all batches.

    Where an asymmetric format has too few steps of it for all data, its range lies around zero, and is moved only to
    the side that reaches further: counted from the lowest value on, one far number would clip all the others.
    """

    def range(self) -> tuple[Tensor, Tensor]:
        """The range of that scale."""
        low, high = super().range()
        scale = 2 * self.mean_abs() / sqrt(settled(self.format, low).qmax)
        zeros = scale == 0  # nothing else was seen: the quantizer knows what to do with an empty range
        bottom, top = self._covered(torch.where(zeros, 1.0, scale), low, high)
        return torch.where(zeros, 0.0, bottom), torch.where(zeros, 0.0, top)

    def _covered(self, scale: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        if self.format.symmetric:
            return range_of_scale(scale, low, self.format)
        span = scale * (self.format.qmax - self.format.qmin)
        bottom = torch.maximum(low.clamp(max=0.0), torch.minimum(-span / 2, high.clamp(min=0.0) - span))
        bottom = torch.round(bottom / scale) * scale
        return bottom, bottom + span
