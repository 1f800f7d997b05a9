"""Rounding to a uniform grid with gradients, for plain and folded weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from bitwright.quantizers.compiled import CompiledKernel, Frame, can_run_compiled, dense, is_worthwhile
from bitwright.quantizers.grid import LARGEST, SMALLEST, Grid, Layout, needed_scale, power_of_two

if TYPE_CHECKING:
    from bitwright.quantizers.base import Quantizer


class _WithGradientOf(torch.autograd.Function):
    """Reads neither tensor, so it needs no pass over memory."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return value.detach()  # not a view for autograd, so that the model may modify it in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:
        return None, (grads[0] if ctx.factor == 1.0 else grads[0] * ctx.factor), None


def with_gradient_of(value: Tensor, x: Tensor, factor: float = 1.0) -> Tensor:
    """`value`, bit-exact, with `factor` times the gradient of `x` (straight-through)."""
    if value.shape != x.shape or torch.compiler.is_compiling():  # compilers fuse it anyway
        return value.detach() + (x - x.detach()) * factor
    if not x.requires_grad:
        return value.detach()
    result: Tensor = _WithGradientOf.apply(value.detach(), x, factor)  # type: ignore[no-untyped-call]
    return result


def usable_scale(scale: Tensor, *, pot: bool, signed: bool = False) -> Tensor:
    """The effective value of a learned scale: a power of two if required, positive unless `signed`, no gradient."""
    size = torch.clamp(scale.detach().abs(), SMALLEST, LARGEST)
    if signed:
        return torch.where(scale.detach() < 0, -size, size)
    return power_of_two(size) if pot else size


def _eager() -> bool:
    """Whether temporaries may be overwritten: nothing is traced, and no double backward is required."""
    return not (torch.compiler.is_compiling() or torch.is_grad_enabled())


def _equal(a: Tensor, b: Tensor) -> Tensor:
    """Where the values are equal; in eager mode as floats, because mixing floats and booleans is ten times slower."""
    return torch.eq(a, b, out=torch.empty_like(a)) if _eager() else a == b


def _positive(x: Tensor) -> Tensor:
    return torch.gt(x, 0.0, out=torch.empty_like(x)) if _eager() else x > 0.0


def _only(values: Tensor, where: Tensor) -> Tensor:
    """The values where the mask is set, 0 elsewhere."""
    return values * where if where.is_floating_point() else torch.where(where, values, 0.0)


def _forward(x: Tensor, scale: Tensor, low: Tensor, high: Tensor) -> Tensor:
    if _eager():
        return torch.div(x, scale).clamp_(low, high).round_().mul_(scale)
    return torch.round(torch.clamp(x / scale, low, high)) * scale


def _forward_relu(x: Tensor, scale: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return _forward(torch.relu(x), scale, low, high)


def _parts(x: Tensor, grad: Tensor, scale: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x and of each element's scale."""
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


# key: whether a ReLU is applied first
_FORWARD = {False: CompiledKernel(_forward), True: CompiledKernel(_forward_relu)}
_BACKWARD = {False: CompiledKernel(_backward), True: CompiledKernel(_backward_relu)}
_BACKWARD_ZERO = CompiledKernel(_backward_zero)
_PLAIN_BACKWARD = {False: CompiledKernel(_plain_backward), True: CompiledKernel(_plain_backward_relu)}


def _frame(x: Tensor, scale: Tensor) -> Frame | None:
    """The view for compiled kernels; None if they can't be used or are not worthwhile."""
    if not is_worthwhile(x):
        return None
    if scale.numel() == 1:
        return Frame(x) if dense(x) else None
    first = scale.dim() == x.dim() and scale.shape[0] == scale.numel() and x.is_contiguous()
    return Frame(x, scale.numel()) if first else None


def _compiled(kernel: CompiledKernel, frame: Frame, large: tuple[Tensor, ...], small: tuple[Tensor, ...]) -> Any:
    shape = (frame.rows, 1) if frame.rows else ()
    flat = (part if part.dim() == 0 else part.reshape(shape if part.numel() > 1 else ()) for part in small)
    return kernel.compiled(*map(frame.view, large), *(part.detach() for part in flat))


class _RoundingSettings(NamedTuple):
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
        how: _RoundingSettings,
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
        again = torch.is_grad_enabled()  # double backward, which compiled kernels don't support
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
    """clamp(round(x/s), n−z, p−z)·s with straight-through rounding. s and z get LSQ's gradients if they are learned.

    `learned`: if s = |learned| within limits, this tensor gets the gradient of s, times `factor`. `relu` rounds relu(x)
    in the same pass. `half` passes gradients half a step beyond the ends, where values still round to the grid, and
    none to s and z. `fused` uses compiled kernels where they are faster.
    """
    if relu and grid.zero_point.requires_grad:
        x, relu = torch.relu(x), False
    scale = grid.scale
    if learned is not None and layout.granularity == "group":  # a scale expanded to blocks has another shape
        scale, learned = with_gradient_of(scale, learned.abs(), factor), None
    how = _RoundingSettings(relu, half, fused, factor)
    rounded: Tensor = _Round.apply(  # type: ignore[no-untyped-call]
        x, layout.spread(scale, x), layout.spread(grid.zero_point, x), learned, (grid.qmin, grid.qmax), how
    )
    return rounded


def _folded_forward(w: Tensor, factor: Tensor, learned: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    scale = usable_scale(learned, pot=False)
    return _rounded(w, factor, scale, low, high), scale


def _forward_guarded(w: Tensor, factor: Tensor, learned: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    needed = needed_scale("int16-pairs", (w * _over(factor)).transpose(1, 2))
    scale = torch.maximum(usable_scale(learned, pot=False), needed)
    return _rounded(w, factor, scale, low, high), scale


def _rounded(w: Tensor, factor: Tensor, scale: Tensor, low: float, high: float) -> Tensor:
    steps = torch.clamp(w * _over(factor) / _over(scale), low, high)
    return torch.round(steps) * _over(scale) / _over(factor)


def _folded_backward(
    w: Tensor, grad: Tensor, factor: Tensor, scale: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor, Tensor]:
    wide, share = _over(factor), grad / _over(factor)
    steps = w * wide / _over(scale)
    clamped = torch.clamp(steps, low, high)
    inside = steps == clamped
    codes = torch.round(clamped)
    to_scale = share * (codes - torch.where(inside, clamped, 0.0))
    to_factor = share * (torch.where(inside, w, 0.0) - codes * _over(scale) / wide)
    return torch.where(inside, grad, 0.0), to_scale, to_factor


def _over(per_channel: Tensor) -> Tensor:
    return per_channel[:, None, None]


_FOLDED_FORWARD = {None: CompiledKernel(_folded_forward), "int16-pairs": CompiledKernel(_forward_guarded)}
_FOLDED_BACKWARD = CompiledKernel(_folded_backward)


class _FoldedSettings(NamedTuple):
    guard: str | None
    low: float
    high: float
    gradient_scale: float
    fused: bool

    def run(self, kernel: CompiledKernel, *inputs: Any) -> Any:
        """Run compiled or not, with bit-identical results."""
        return (kernel.compiled if self.fused and can_run_compiled() else kernel.function)(*inputs)


class _RoundFolded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, factor: Tensor, learned: Tensor, how: _FoldedSettings) -> Tensor:
        channels, f = _channels(weight), factor.detach().reshape(-1)
        rounded, scale = how.run(_FOLDED_FORWARD[how.guard], channels, f, learned.detach(), how.low, how.high)
        ctx.save_for_backward(weight, factor, learned, scale)
        ctx.how = how
        result: Tensor = rounded.view(weight.shape).detach()
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight, factor, learned, scale = ctx.saved_tensors
        how: _FoldedSettings = ctx.how
        (grad,) = grads
        if torch.is_grad_enabled():  # double backward, which compiled kernels don't support
            grid = Grid(scale, torch.zeros_like(scale), int(how.low), int(how.high))
            steps = {"learned": learned, "factor": how.gradient_scale}
            again = round_to_grid(weight * factor, grid, Layout("channel", 0), **steps) / factor
            return (*torch.autograd.grad(again, (weight, factor, learned), grad, create_graph=True), None)
        inputs = _channels(weight), _channels(grad), factor.detach().reshape(-1)
        to_weight, *parts = how.run(_FOLDED_BACKWARD, *inputs, scale, how.low, how.high)
        # Sums are computed here: in compiled code, their order depends on the first compiled shape, so the last bits
        # of a resumed run would differ.
        to_scale, to_factor = (part.sum((1, 2)) for part in parts)
        to_learned = to_scale * (torch.sgn(learned) * how.gradient_scale)
        return to_weight.view(weight.shape), to_factor.view(factor.shape), to_learned, None


def _channels(x: Tensor) -> Tensor:
    """View any weight as (output channel, input channel, kernel position); not a view for autograd."""
    return x.detach().contiguous().view(x.shape[0], x.shape[1], -1)


def can_fold(quantizer: Quantizer, weight: Tensor) -> bool:
    """Whether these kernels are equivalent to the quantizer for this weight."""
    layout, format = quantizer.layout, quantizer.spec.format
    return (
        not torch.compiler.is_compiling()  # compilers fuse it anyway
        and (layout.granularity, layout.axis) == ("channel", 0)
        and format.symmetric
        and not (format.pot or format.full)
        and weight.dtype == torch.float32
        and weight.is_contiguous()
        and quantizer.spec.guard in _FOLDED_FORWARD
        and not quantizer.kind.startswith("conv_transpose")  # its guard pairs values along the other axis
    )


def round_folded(quantizer: Quantizer, weight: Tensor, factor: Tensor) -> Tensor:
    """`weight`·`factor` (one per output channel), rounded to the learned scale and divided by the factor."""
    how = _FoldedSettings(
        guard=quantizer.spec.guard,
        low=float(quantizer.qmin),
        high=float(quantizer.qmax),
        gradient_scale=quantizer.gradient_scale(weight),
        fused=quantizer.compiled,
    )
    rounded: Tensor = _RoundFolded.apply(weight, factor, quantizer.scale, how)  # type: ignore[no-untyped-call]
    return rounded
