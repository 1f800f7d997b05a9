"""Bases of quantizers with levels of their own: fixed ranges, uneven levels, weights that keep their size."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from bitwright.quantizers.base import Quantizer
from bitwright.quantizers.grid import Grid, Layout, guarded_scale, size_of
from bitwright.quantizers.rounding import round_to_grid, usable_scale, with_gradient_of


class Sized(Quantizer):
    """A quantizer that gives weights another size: a norm behind the operator makes up for that.

    A folded norm can't. Its running σ is measured behind Q(w·γ/σ)/(γ/σ): were Q k times as large as its argument, so
    would σ be as it was a step before, without end, while what is deployed is k times as large as in training.
    """

    @property
    def keeps_size(self) -> bool:
        """Whether what comes is a weight times γ/σ."""
        return self.weight and self.fold is not None

    def as_large(self, squeezed: Tensor, x: Tensor) -> Tensor:
        """Each output channel as large as that of `x`, with all gradients."""
        assert self.fold is not None
        channels = Layout("channel", self.fold.axis)
        return squeezed * channels.over(ratio(x, squeezed, channels), x)


def ratio(x: Tensor, other: Tensor, layout: Layout) -> Tensor:
    """How much larger `x` is than the other, one number per row; 1 where the other is zero."""
    # norms of numbers near 1: squares of very small or large ones leave the range of float32
    units = [size_of(layout.rows(part.detach())) for part in (x, other)]
    large, own = (
        torch.linalg.vector_norm(layout.rows(part) / unit[:, None], dim=1)
        for part, unit in zip((x, other), units, strict=True)
    )
    alive = own > 0
    return torch.where(alive, large / torch.where(alive, own, 1.0) * (units[0] / units[1]), 1.0)


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
