"""What quantizers share: values with somebody else's gradient, and the rounding that all uniform ones do."""

from __future__ import annotations

import torch
from torch import Tensor

from bitwright.attach.grid import EPS


def with_gradient_of(value: Tensor, x: Tensor, factor: float = 1.0) -> Tensor:
    """`value`, to the last bit, with `factor` times the gradient of `x` (straight-through)."""
    return value.detach() + (x - x.detach()) * factor


def round_to_grid(x: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int) -> Tensor:
    """clamp(round(x/s), n−z, p−z)·s with straight-through rounding; s and z get LSQ's gradients if they learn."""
    steps = torch.clamp(x / scale, qmin - zero_point, qmax - zero_point)
    return with_gradient_of(torch.round(steps), steps) * scale


def usable_scale(scale: Tensor, *, pot: bool) -> Tensor:
    """A learned scale as arithmetic uses it: positive, a power of two where the format wants one. No gradient."""
    scale = torch.clamp(scale.detach().abs(), min=EPS)
    return torch.exp2(torch.round(torch.log2(scale))) if pot else scale
