"""DoReFa: weights squeezed by tanh into [−1, 1], activations clipped to [0, 1] or [−1, 1]; nothing is learned."""

from __future__ import annotations

import torch
from torch import Tensor

from bitwright.attach import Grid, Quantizer, round_to_grid, with_gradient_of

_TINY = 1e-12  # a row of zeros stays zeros


class DoReFa(Quantizer):
    """w̃ = tanh(w)/max|tanh(w)| rounded to the grid of [−1, 1], straight-through.

    The result has another size than the weight: a norm behind the operator, or training, makes up for it.
    """

    def set_range(self, low: Tensor, high: Tensor, shape: torch.Size, values: Tensor | None = None) -> None:
        """The range is fixed; only the sign of what was seen counts."""
        super().set_range(torch.where(low < 0, -1.0, 0.0), torch.ones_like(high), shape, values)

    def set_grid(self, grid: Grid) -> None:
        """A symmetric signed grid ends at −1 as it does at 1."""
        qmin = -grid.qmax if self.spec.format.symmetric and grid.qmin < 0 else grid.qmin
        super().set_grid(Grid(grid.scale, grid.zero_point, qmin, grid.qmax))

    def transform(self, x: Tensor) -> Tensor:
        """Squeeze a weight."""
        if not self.weight:
            return x
        squeezed = torch.tanh(x)
        largest = self.layout.rows(squeezed).abs().amax(dim=1).clamp(min=_TINY)
        return squeezed / self.layout.spread(self.layout.fold(largest, x.shape), x)

    def quantize(self, x: Tensor) -> Tensor:
        """Round; the gradient is that of the squeezing or clipping."""
        x = self.transform(x)
        scale, zero_point = self.layout.spread(self.scale, x), self.layout.spread(self.zero_point, x)
        ends = ((code - zero_point) * scale for code in (self.qmin, self.qmax))
        value = round_to_grid(x.detach(), scale, zero_point, self.qmin, self.qmax)
        return with_gradient_of(value, x if self.weight else torch.clamp(x, *ends))
