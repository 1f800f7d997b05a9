"""What quantizers share: values with somebody else's gradient, and scales that training can't spoil."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitwright.attach.grid import LARGEST, SMALLEST, power_of_two


class _WithGradientOf(torch.autograd.Function):
    """Reads neither tensor: no pass over memory, forward or backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return value.detach()  # no view to autograd: the model may go on in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:
        return None, (grads[0] if ctx.factor == 1.0 else grads[0] * ctx.factor), None


def with_gradient_of(value: Tensor, x: Tensor, factor: float = 1.0) -> Tensor:
    """`value`, to the last bit, with `factor` times the gradient of `x` (straight-through)."""
    if value.shape != x.shape or torch.compiler.is_compiling():  # compilers make one pass of it in any case
        return value.detach() + (x - x.detach()) * factor
    if not x.requires_grad:
        return value.detach()
    result: Tensor = _WithGradientOf.apply(value.detach(), x, factor)  # type: ignore[no-untyped-call]
    return result


def usable_scale(scale: Tensor, *, pot: bool) -> Tensor:
    """A learned scale as arithmetic uses it: positive, a power of two where the format wants one. No gradient."""
    scale = torch.clamp(scale.detach().abs(), SMALLEST, LARGEST)
    return power_of_two(scale) if pot else scale
