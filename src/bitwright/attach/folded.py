"""Rounding a weight as it is deployed, w·f with f = γ/σ, and dividing by f again: one pass forward, one backward.

x̂ = round(clamp(w·f/s))·s/f, where a guard may raise s. Backward: ∂w passes inside the grid; ∂s is LSQ's, by f;
∂f = (w inside − x̂)/f. A weight is small, and each of the dozens of operators that this replaces costs a call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from bitwright.attach.compiled import Kernel, works_here
from bitwright.attach.gradients import usable_scale
from bitwright.attach.grid import Grid, Layout
from bitwright.attach.guards import needed_scale
from bitwright.attach.rounding import round_to_grid

if TYPE_CHECKING:
    from bitwright.attach.quantizer import Quantizer


def _forward(w: Tensor, factor: Tensor, learned: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    scale = usable_scale(learned, pot=False)
    return _rounded(w, factor, scale, low, high), scale


def _forward_guarded(w: Tensor, factor: Tensor, learned: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    needed = needed_scale("int16-pairs", (w * _over(factor)).transpose(1, 2))
    scale = torch.maximum(usable_scale(learned, pot=False), needed)
    return _rounded(w, factor, scale, low, high), scale


def _rounded(w: Tensor, factor: Tensor, scale: Tensor, low: float, high: float) -> Tensor:
    steps = torch.clamp(w * _over(factor) / _over(scale), low, high)
    return torch.round(steps) * _over(scale) / _over(factor)


def _backward(
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


_FORWARD = {None: Kernel(_forward), "int16-pairs": Kernel(_forward_guarded)}
_BACKWARD = Kernel(_backward)


class _How(NamedTuple):
    guard: str | None
    low: float
    high: float
    gradient_scale: float
    fused: bool

    def run(self, kernel: Kernel, *inputs: Any) -> Any:
        """In compiled code or not: the same bits."""
        return (kernel.compiled if self.fused and works_here() else kernel.function)(*inputs)


class _RoundFolded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, factor: Tensor, learned: Tensor, how: _How) -> Tensor:
        channels, f = _channels(weight), factor.detach().reshape(-1)
        rounded, scale = how.run(_FORWARD[how.guard], channels, f, learned.detach(), how.low, how.high)
        ctx.save_for_backward(weight, factor, learned, scale)
        ctx.how = how
        result: Tensor = rounded.view(weight.shape).detach()
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight, factor, learned, scale = ctx.saved_tensors
        how: _How = ctx.how
        (grad,) = grads
        if torch.is_grad_enabled():  # a gradient of gradients is wanted, of which compiled kernels have none
            grid = Grid(scale, torch.zeros_like(scale), int(how.low), int(how.high))
            steps = {"learned": learned, "factor": how.gradient_scale}
            again = round_to_grid(weight * factor, grid, Layout("channel", 0), **steps) / factor
            return (*torch.autograd.grad(again, (weight, factor, learned), grad, create_graph=True), None)
        inputs = _channels(weight), _channels(grad), factor.detach().reshape(-1)
        to_weight, *parts = how.run(_BACKWARD, *inputs, scale, how.low, how.high)
        # Summed here: the order of sums in compiled code depends on what it was first compiled for, and so would the
        # last bits of a run that is resumed.
        to_scale, to_factor = (part.sum((1, 2)) for part in parts)
        to_learned = to_scale * (torch.sgn(learned) * how.gradient_scale)
        return to_weight.view(weight.shape), to_factor.view(factor.shape), to_learned, None


def _channels(x: Tensor) -> Tensor:
    """(output channel, input channel, kernel position), whatever the weight's axes are; no view to autograd."""
    return x.detach().contiguous().view(x.shape[0], x.shape[1], -1)


def can_fold(quantizer: Quantizer, weight: Tensor) -> bool:
    """Whether these kernels compute what the quantizer does to this weight."""
    layout, format = quantizer.layout, quantizer.spec.format
    return (
        not torch.compiler.is_compiling()  # compilers make few passes of it in any case
        and (layout.granularity, layout.axis) == ("channel", 0)
        and format.symmetric
        and not format.pot
        and weight.dtype == torch.float32
        and weight.is_contiguous()
        and quantizer.spec.guard in _FORWARD
        and not quantizer.kind.startswith("conv_transpose")  # its guard pairs along the other axis
    )


def round_folded(quantizer: Quantizer, weight: Tensor, factor: Tensor) -> Tensor:
    """`weight`·`factor` (one per output channel) rounded to the learned scale, and divided by the factor again."""
    how = _How(
        guard=quantizer.spec.guard,
        low=float(quantizer.qmin),
        high=float(quantizer.qmax),
        gradient_scale=quantizer.gradient_scale(weight),
        fused=quantizer.compiled,
    )
    rounded: Tensor = _RoundFolded.apply(weight, factor, quantizer.scale, how)  # type: ignore[no-untyped-call]
    return rounded
