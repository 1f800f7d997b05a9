"""The range that LSQ starts from."""

from __future__ import annotations

from math import sqrt

from torch import Tensor

from bitwright.attach.grid import EPS
from bitwright.observers.moments import MomentsObserver
from bitwright.observers.scaled import range_of_scale, settled


class LsqStart(MomentsObserver):
    """s = 2·mean|x|/√p over all batches; asymmetric formats count their steps from the lowest value."""

    def range(self) -> tuple[Tensor, Tensor]:
        """The range of that scale."""
        low, _ = super().range()
        scale = 2 * self.mean_abs() / sqrt(settled(self.format, low).qmax)
        return range_of_scale(scale.clamp(min=EPS), low, self.format)
