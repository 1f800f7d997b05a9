"""What quantizers share that squeeze numbers into a fixed range and round them there."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from bitwright.attach import Grid, round_to_grid, usable_scale, with_gradient_of
from bitwright.attach.guards import guarded_scale
from bitwright.quantizers.sized import Sized, ratio


class UnitRange(Sized):
    """Rounds `squeeze(x)` to the grid of [−1, 1], or [0, 1] where nothing was negative; straight-through.

    The result has another size than what came: a norm behind the operator, or training, makes up for it. A weight
    with a folded norm gets its size back, and its scale follows it.
    """

    balanced = True
    own_kernels = property(lambda self: self.keeps_size)  # channels are lost where a kernel sees one long row

    def squeeze(self, x: Tensor) -> Tensor:
        """`x` in the fixed range."""
        raise NotImplementedError

    def set_range(self, low: Tensor, high: Tensor, shape: torch.Size, values: Tensor | None = None) -> None:
        """The range is fixed; only the sign of what was seen counts."""
        super().set_range(torch.where(low < 0, -1.0, 0.0), torch.ones_like(high), shape, values)

    def forward(
        self, x: Tensor, site: str | None = None, *, relu: bool = False, factor: Tensor | None = None
    ) -> Tensor:
        """As ever; first the scale follows the weight, so that all who look on see the one in force."""
        if self.keeps_size and self.ready and factor is None and not self.marking:
            self.keep("scale", self._sized(x.detach().to(torch.float32))[1].scale)
        return super().forward(x, site, relu=relu, factor=factor)

    def transform(self, x: Tensor) -> Tensor:
        """What is rounded."""
        return self._sized(x)[0] if self.keeps_size else self.squeeze(x)

    def quantize(self, x: Tensor) -> Tensor:
        """Round; the gradient is that of the transformation."""
        x, grid = self._sized(x) if self.keeps_size else (self.squeeze(x), self.grid())
        return with_gradient_of(round_to_grid(x.detach(), grid, self.layout), x)

    def _sized(self, x: Tensor) -> tuple[Tensor, Grid]:
        """The squeezed weight as large as it came, and a grid on which it is still so when it is rounded."""
        values, layout = self.as_large(self.squeeze(x), x), self.layout
        with torch.no_grad():
            farthest = layout.fold(layout.rows(values).abs().amax(dim=1), x.shape)
            scale = usable_scale(farthest / (self.qmax - self.zero_point), pot=self.spec.format.pot)
            if self.spec.guard is not None:
                scale = guarded_scale(self.spec.guard, scale, values, kind=self.kind, layout=layout)
            grid = Grid(scale, self.zero_point.detach(), self.qmin, self.qmax)
            if self.spec.format.pot:  # such a scale can't follow exactly; it needn't, as it doesn't follow each step
                return values, grid
            more = layout.fold(ratio(x, round_to_grid(values, grid, layout), layout), x.shape)
        return values * layout.spread(more, x), replace(grid, scale=scale * more)
