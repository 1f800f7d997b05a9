"""LSQ+: the zero point is learned together with the scale."""

from __future__ import annotations

import torch

from bitwright.quantizers.grid import Grid
from bitwright.quantizers.lsq import Lsq


class LsqPlus(Lsq):
    """LSQ with ∂z = g·{−s where clipped; 0 inside}. A symmetric format has no zero point to learn.

    The parameter is a real number. Every forward and the artefact round it to an integer code.
    The observer `lsqplus` gives the published initial value, from |μ ± 3σ|.
    """

    learned_if_asymmetric = ("zero_point",)

    def invalid_state(self) -> str | None:
        """A zero point far from all codes. Training moves it only slightly beyond them."""
        most = self.qmax - self.qmin
        far = (self.zero_point < self.qmin - most) | (self.zero_point > self.qmax + most)
        return "zero_point" if bool(far.any()) else None

    def grid(self) -> Grid:
        """The grid with the zero point rounded to a code."""
        grid = super().grid()
        zero_point = torch.clamp(torch.round(grid.zero_point), grid.qmin, grid.qmax)
        return Grid(grid.scale, zero_point, grid.qmin, grid.qmax)
