"""Rounding to a uniform grid with LSQ's gradients, as one pass forward and one backward.

clamp(round(x/s), n−z, p−z)·s. Backward computes everything again from `x`, the one large tensor that it keeps: the
gradient passes inside the grid; ∂s = round(x/s) − x/s inside, the code at its end outside; ∂z = −s outside.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitwright.attach.compiled import Kernel, wanted


def _forward(x: Tensor, scale: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return torch.div(x, scale).clamp_(low, high).round_().mul_(scale)


def _parts(x: Tensor, grad: Tensor, scale: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x and of each element's own scale, and where the grid ends clip."""
    steps = x / scale
    clamped = torch.clamp(steps, low, high)
    inside = steps == clamped
    to_x = torch.where(inside, grad, 0.0)
    to_scale = grad * (torch.round(clamped) - torch.where(inside, steps, 0.0))
    return to_x, to_scale, inside


def _backward(x: Tensor, grad: Tensor, scale: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    to_x, to_scale, _ = _parts(x, grad, scale, low, high)
    return to_x, to_scale.sum_to_size(scale.shape)


def _backward_zero(x: Tensor, grad: Tensor, scale: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    to_x, to_scale, inside = _parts(x, grad, scale, low, high)
    to_zero = torch.where(inside, 0.0, -grad * scale)
    return to_x, to_scale.sum_to_size(scale.shape), to_zero.sum_to_size(low.shape)


def _forward_relu(x: Tensor, scale: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return _forward(torch.relu(x), scale, low, high)


def _backward_relu(x: Tensor, grad: Tensor, scale: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    to_x, to_scale = _backward(torch.relu(x), grad, scale, low, high)
    return torch.where(x <= 0, 0.0, to_x), to_scale


FORWARD, FORWARD_RELU = Kernel(_forward), Kernel(_forward_relu)
BACKWARD, BACKWARD_RELU, BACKWARD_ZERO = Kernel(_backward), Kernel(_backward_relu), Kernel(_backward_zero)


def _dense(x: Tensor) -> bool:
    """Whether the elements lie side by side in memory, in an order that is a usual one."""
    if x.is_contiguous():
        return True
    format = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    return format is not None and x.is_contiguous(memory_format=format)


def _flat(x: Tensor) -> Tensor:
    return x.as_strided((x.numel(),), (1,))


class _Frame:
    """How tensors of one call look to the kernels: as a row, or as a matrix with one row per scale.

    With one or two axes whatever the model has, few variants are compiled.
    """

    def __init__(self, x: Tensor, scale: Tensor) -> None:
        self.shape, self.stride = x.shape, x.stride()
        self.rows = 0
        self.fused = wanted(x.numel())
        if self.fused and scale.numel() > 1:
            self.rows = scale.shape[0] if scale.dim() == x.dim() and scale.shape[0] == scale.numel() else 0
            self.fused = self.rows > 0 and x.is_contiguous()
        self.fused = self.fused and _dense(x)

    def view(self, x: Tensor) -> Tensor:
        """A tensor of the size of `x`."""
        if x.stride() != self.stride:
            x = torch.empty_strided(self.shape, self.stride, dtype=x.dtype, device=x.device).copy_(x)
        return x.detach().view(self.rows, -1) if self.rows else _flat(x.detach())

    def small(self, value: Tensor) -> Tensor:
        """A scale, or an end of the grid."""
        return value.detach().reshape((self.rows, 1) if self.rows and value.numel() > 1 else ())

    def back(self, x: Tensor) -> Tensor:
        """The inverse of `view`."""
        return x.as_strided(self.shape, self.stride)


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int, relu: bool) -> Tensor:
        low, high = qmin - zero_point, qmax - zero_point
        ctx.save_for_backward(x, scale, low, high)
        ctx.relu = relu
        kernel = FORWARD_RELU if relu else FORWARD
        frame = _Frame(x, scale)
        ctx.frame = frame
        if not frame.fused:
            result: Tensor = kernel.function(x, scale, low, high)
            return result
        return frame.back(kernel(frame.view(x), *map(frame.small, (scale, low, high)), fused=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, low, high = ctx.saved_tensors
        (grad,) = grads
        frame: _Frame = ctx.frame
        kernel = BACKWARD_ZERO if ctx.needs_input_grad[2] else BACKWARD
        if ctx.relu:
            kernel = BACKWARD_RELU
        # a gradient of gradients is wanted: compiled kernels have none
        if not frame.fused or torch.is_grad_enabled():
            to_x, *rest = kernel.function(x, grad, scale, low, high)
        else:
            to_x, *rest = kernel(frame.view(x), frame.view(grad), *map(frame.small, (scale, low, high)), fused=True)
            to_x = frame.back(to_x)
            rest = [part.reshape(like.shape) for part, like in zip(rest, (scale, low), strict=False)]
        return to_x, rest[0], (rest[1] if len(rest) > 1 else None), None, None, None


def round_to_grid(
    x: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int, *, relu: bool = False
) -> Tensor:
    """clamp(round(x/s), n−z, p−z)·s with straight-through rounding; s and z get LSQ's gradients if they learn.

    `relu` rounds relu(x), in the same pass.
    """
    if relu and zero_point.requires_grad:
        x, relu = torch.relu(x), False
    rounded: Tensor = _Round.apply(x, scale, zero_point, qmin, qmax, relu)  # type: ignore[no-untyped-call]
    return rounded
