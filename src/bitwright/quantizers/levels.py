"""Base classes of quantizers with fixed ranges or non-uniform levels."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from bitwright.quantizers.base import Quantizer
from bitwright.quantizers.grid import Grid, Layout, guarded_scale, size_of
from bitwright.quantizers.rounding import round_to_grid, usable_scale, with_gradient_of


class Sized(Quantizer):
    """A quantizer that changes the magnitude of weights. A norm after the operator compensates for this.

    A folded norm can't: its running σ is measured after Q(w·γ/σ)/(γ/σ). If Q returned k times its argument, σ would
    grow by k in each step, and the deployed output would be k times that of training.
    """

    @property
    def preserves_magnitude(self) -> bool:
        """Whether the input is a weight times γ/σ, so that its magnitude must be preserved."""
        return self.weight and self.fold is not None

    def with_magnitude_of(self, squeezed: Tensor, x: Tensor) -> Tensor:
        """Scale each output channel to the magnitude of `x`, with all gradients."""
        assert self.fold is not None
        channels = Layout("channel", self.fold.axis)
        return squeezed * channels.over(ratio(x, squeezed, channels), x)


def ratio(x: Tensor, other: Tensor, layout: Layout) -> Tensor:
    """The ratio of the norms of `x` and `other`, per row; 1 where `other` is zero."""
    # normalize first: squares of very small or large numbers exceed the range of float32
    units = [size_of(layout.rows(part.detach())) for part in (x, other)]
    large, own = (
        torch.linalg.vector_norm(layout.rows(part) / unit[:, None], dim=1)
        for part, unit in zip((x, other), units, strict=True)
    )
    alive = own > 0
    return torch.where(alive, large / torch.where(alive, own, 1.0) * (units[0] / units[1]), 1.0)


class NonUniformQuantizer(Quantizer):
    """A quantizer with non-uniform levels. `scale` is the upper end of the range. It can't be exported as Q/DQ pair."""

    exportable = False
    symmetric_only = True

    def set_grid(self, grid: Grid) -> None:
        super().set_grid(Grid(grid.scale * grid.qmax, grid.zero_point, grid.qmin, grid.qmax))

    def end(self) -> Tensor:
        """The upper end, without gradient: positive, and a power of two if the format requires it."""
        return usable_scale(self.scale, pot=self.spec.format.pot) if self.learns("scale") else self.scale.detach()

    def grid(self) -> Grid:
        """A uniform grid over the same range, for reports."""
        return Grid(self.end() / self.qmax, self.zero_point, self.qmin, self.qmax)


class UnitRangeQuantizer(Sized):
    """Rounds `squeeze(x)` to the grid of [−1, 1], or [0, 1] if no input was negative; straight-through gradient.

    The result has a different magnitude than the input. A norm after the operator, or training, compensates for this. A
    weight with a folded norm is rescaled to its original magnitude, and the scale is updated with it.
    """

    balanced = True
    own_kernels = property(lambda self: self.preserves_magnitude)  # a kernel that views one long row has no channels

    def squeeze(self, x: Tensor) -> Tensor:
        """Map `x` to the fixed range."""
        raise NotImplementedError

    def set_range(self, low: Tensor, high: Tensor, shape: torch.Size, values: Tensor | None = None) -> None:
        """Use the fixed range. Only the sign of the observed values matters."""
        super().set_range(torch.where(low < 0, -1.0, 0.0), torch.ones_like(high), shape, values)

    def forward(
        self, x: Tensor, site: str | None = None, *, relu: bool = False, factor: Tensor | None = None
    ) -> Tensor:
        """Update the scale first, so that all readers get the current one."""
        if self.preserves_magnitude and self.ready and factor is None and not self.marking:
            self.keep("scale", self._sized(x.detach().to(torch.float32))[1].scale)
        return super().forward(x, site, relu=relu, factor=factor)

    def transform(self, x: Tensor) -> Tensor:
        """The value that is rounded."""
        return self._sized(x)[0] if self.preserves_magnitude else self.squeeze(x)

    def quantize(self, x: Tensor) -> Tensor:
        """Round with the gradient of the transformation."""
        x, grid = self._sized(x) if self.preserves_magnitude else (self.squeeze(x), self.grid())
        return with_gradient_of(round_to_grid(x.detach(), grid, self.layout), x)

    def _sized(self, x: Tensor) -> tuple[Tensor, Grid]:
        """The squeezed weight with its original magnitude, and a grid that preserves the magnitude after rounding."""
        values, layout = self.with_magnitude_of(self.squeeze(x), x), self.layout
        with torch.no_grad():
            farthest = layout.fold(layout.rows(values).abs().amax(dim=1), x.shape)
            scale = usable_scale(farthest / (self.qmax - self.zero_point), pot=self.spec.format.pot)
            if self.spec.guard is not None:
                scale = guarded_scale(self.spec.guard, scale, values, kind=self.kind, layout=layout)
            grid = Grid(scale, self.zero_point.detach(), self.qmin, self.qmax)
            if self.spec.format.pot:  # the scale can't match exactly, and it isn't updated in each step
                return values, grid
            more = layout.fold(ratio(x, round_to_grid(values, grid, layout), layout), x.shape)
        return values * layout.spread(more, x), replace(grid, scale=scale * more)
