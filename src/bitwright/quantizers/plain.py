"""The plain quantizer: round to the nearest code; the gradient passes where nothing is clipped."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitwright.attach import Quantizer


class _RoundToGrid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int) -> Tensor:
        steps = torch.round(x / scale)
        low, high = qmin - zero_point, qmax - zero_point
        ctx.save_for_backward((steps >= low) & (steps <= high))
        return torch.clamp(steps, low, high) * scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (inside,) = ctx.saved_tensors
        return grads[0] * inside, None, None, None, None


class Plain(Quantizer):
    """x̂ = (clamp(round(x/s) + z, n, p) − z)·s, ∂x̂/∂x = 1 inside the range and 0 outside."""

    def quantize(self, x: Tensor) -> Tensor:
        """Round to the grid."""
        scale = self.layout.spread(self.scale, x)
        zero_point = self.layout.spread(self.zero_point, x)
        rounded: Tensor = _RoundToGrid.apply(  # type: ignore[no-untyped-call]
            x, scale, zero_point, self.qmin, self.qmax
        )
        return rounded
