"""Rounding to a uniform grid with LSQ's gradients, as one pass forward and one backward.

clamp(round(x/s), n−z, p−z)·s. Backward computes everything again from `x`, the one large tensor that it keeps: the
gradient passes inside the grid; ∂s = round(x/s) − x/s inside, the code at its end outside; ∂z = −s outside.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitwright.attach.compiled import Frame, Kernel, dense, worthwhile
from bitwright.attach.gradients import with_gradient_of
from bitwright.attach.grid import Grid, Layout


def _eager() -> bool:
    """Nobody traces, and no gradient of gradients is wanted: temporaries may be written over."""
    return not (torch.compiler.is_compiling() or torch.is_grad_enabled())


def _equal(a: Tensor, b: Tensor) -> Tensor:
    """Where they are; eagerly as floats, as torch is ten times slower where floats meet booleans."""
    return torch.eq(a, b, out=torch.empty_like(a)) if _eager() else a == b


def _positive(x: Tensor) -> Tensor:
    return torch.gt(x, 0.0, out=torch.empty_like(x)) if _eager() else x > 0.0


def _only(values: Tensor, where: Tensor) -> Tensor:
    """The values there, 0 elsewhere."""
    return values * where if where.is_floating_point() else torch.where(where, values, 0.0)


def _forward(x: Tensor, scale: Tensor, low: Tensor, high: Tensor) -> Tensor:
    if _eager():
        return torch.div(x, scale).clamp_(low, high).round_().mul_(scale)
    return torch.round(torch.clamp(x / scale, low, high)) * scale


def _forward_relu(x: Tensor, scale: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return _forward(torch.relu(x), scale, low, high)


def _parts(x: Tensor, grad: Tensor, scale: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x and of each element's own scale."""
    steps = x / scale
    clamped = torch.clamp(steps, low, high)
    inside = _equal(steps, clamped)
    error = torch.round(clamped) - _only(clamped, inside)
    return _only(grad, inside), grad * error


def _backward(x: Tensor, grad: Tensor, scale: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    to_x, to_scale = _parts(x, grad, scale, low, high)
    return to_x, to_scale.sum_to_size(scale.shape)


def _backward_relu(x: Tensor, grad: Tensor, scale: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    to_x, to_scale = _backward(torch.relu(x), grad, scale, low, high)
    return _only(to_x, _positive(x)), to_scale


def _backward_zero(x: Tensor, grad: Tensor, scale: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    to_x, to_scale = _parts(x, grad, scale, low, high)
    return to_x, to_scale.sum_to_size(scale.shape), ((to_x - grad) * scale).sum_to_size(low.shape)


def _plain_backward(x: Tensor, grad: Tensor, scale: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor]:
    codes = torch.round(x / scale)
    return (_only(grad, _equal(codes, torch.clamp(codes, low, high))),)


def _plain_backward_relu(x: Tensor, grad: Tensor, scale: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor]:
    (to_x,) = _plain_backward(torch.relu(x), grad, scale, low, high)
    return (_only(to_x, _positive(x)),)


# by whether a ReLU comes first
_FORWARD = {False: Kernel(_forward), True: Kernel(_forward_relu)}
_BACKWARD = {False: Kernel(_backward), True: Kernel(_backward_relu)}
_BACKWARD_ZERO = Kernel(_backward_zero)
_PLAIN_BACKWARD = {False: Kernel(_plain_backward), True: Kernel(_plain_backward_relu)}


def _frame(x: Tensor, scale: Tensor) -> Frame | None:
    """How compiled kernels see this call; None where they can't, or where it isn't worth it."""
    if not worthwhile(x):
        return None
    if scale.numel() == 1:
        return Frame(x) if dense(x) else None
    first = scale.dim() == x.dim() and scale.shape[0] == scale.numel() and x.is_contiguous()
    return Frame(x, scale.numel()) if first else None


def _compiled(kernel: Kernel, frame: Frame, large: tuple[Tensor, ...], small: tuple[Tensor, ...]) -> Any:
    shape = (frame.rows, 1) if frame.rows else ()
    flat = (part if part.dim() == 0 else part.reshape(shape if part.numel() > 1 else ()) for part in small)
    return kernel.compiled(*map(frame.view, large), *(part.detach() for part in flat))


class _How(NamedTuple):
    relu: bool
    half: bool
    fused: bool
    factor: float


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor,
        zero_point: Tensor,
        learned: Tensor | None,
        codes: tuple[int, int],
        how: _How,
    ) -> Tensor:
        small = (scale, codes[0] - zero_point, codes[1] - zero_point)
        ctx.save_for_backward(x, learned, *small)
        ctx.how = how
        ctx.frame = _frame(x, scale) if how.fused else None
        frame: Frame | None = ctx.frame
        if frame is None:
            result: Tensor = _FORWARD[how.relu].function(x, *small)
            return result
        return frame.back(_compiled(_FORWARD[how.relu], frame, (x,), small))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, learned, scale, *ends = ctx.saved_tensors
        how = ctx.how
        if how.half:
            kernel = _PLAIN_BACKWARD[how.relu]
        else:
            kernel = _BACKWARD_ZERO if ctx.needs_input_grad[2] else _BACKWARD[how.relu]
        again = torch.is_grad_enabled()  # a gradient of gradients is wanted, of which compiled kernels have none
        if again and learned is not None:
            scale = with_gradient_of(scale, learned.abs().reshape(scale.shape))
        if ctx.frame is None or again:
            to_x, *rest = kernel.function(x, *grads, scale, *ends)
        else:
            to_x, *rest = _compiled(kernel, ctx.frame, (x, *grads), (scale, *ends))
            to_x = ctx.frame.back(to_x)
            rest = [part.reshape(like.shape) for part, like in zip(rest, (scale, *ends), strict=False)]
        to_scale, to_zero = (*rest, None, None)[:2]
        if learned is None:
            return to_x, to_scale, to_zero, None, None, None
        return to_x, None, to_zero, to_scale.reshape(learned.shape) * (torch.sgn(learned) * how.factor), None, None


def round_to_grid(
    x: Tensor,
    grid: Grid,
    layout: Layout,
    *,
    learned: Tensor | None = None,
    factor: float = 1.0,
    relu: bool = False,
    half: bool = False,
    fused: bool = False,
) -> Tensor:
    """clamp(round(x/s), n−z, p−z)·s with straight-through rounding; s and z get LSQ's gradients if they learn.

    `learned`: where s = |learned| up to limits, this gets the gradient of s instead, times `factor`. `relu` rounds
    relu(x) in the same pass. `half` passes gradients half a step beyond the ends, where rounding still ends on the
    grid, and none to s and z. `fused` runs compiled kernels where that pays.
    """
    if relu and grid.zero_point.requires_grad:
        x, relu = torch.relu(x), False
    scale = grid.scale
    if learned is not None and layout.granularity == "group":  # spread over blocks, a scale has another shape
        scale, learned = with_gradient_of(scale, learned.abs(), factor), None
    how = _How(relu, half, fused, factor)
    rounded: Tensor = _Round.apply(  # type: ignore[no-untyped-call]
        x, layout.spread(scale, x), layout.spread(grid.zero_point, x), learned, (grid.qmin, grid.qmax), how
    )
    return rounded
