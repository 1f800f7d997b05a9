"""What quantizers share whose levels aren't evenly spaced."""

from __future__ import annotations

from torch import Tensor

from bitwright.attach import Grid, Quantizer, usable_scale


class Uneven(Quantizer):
    """`scale` keeps the upper end of the range, not a step. No Q/DQ pair has such levels."""

    exportable = False
    symmetric_only = True

    def set_grid(self, grid: Grid) -> None:
        """Keep the upper end."""
        super().set_grid(Grid(grid.scale * grid.qmax, grid.zero_point, grid.qmin, grid.qmax))

    def end(self) -> Tensor:
        """The upper end as arithmetic uses it; no gradient. One that is learned stays positive, or a power of two."""
        return usable_scale(self.scale, pot=self.spec.format.pot) if self.learns("scale") else self.scale.detach()

    def grid(self) -> Grid:
        """A uniform grid over the same span, for reports."""
        return Grid(self.end() / self.qmax, self.zero_point, self.qmin, self.qmax)
