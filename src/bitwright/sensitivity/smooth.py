"""ReLUs with a second derivative: how often noise carries a number over the kink, and with it its gradient.

ReLU's slope is a step, whose derivative is zero but in one point, where it is infinite. Noise of variance σ² flips the
slope of a number z with the probability that z + ε has another sign: in the mean p(0)·σ·√(2/π), where p is the density
of z. A step with a ramp of width 2h instead gives p(0)·σ²/(2h): the same, if h = σ·√(π/8).
"""

from __future__ import annotations

from math import pi, sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_RELUS = {F.relu, torch.relu, torch.Tensor.relu}
_IN_PLACE = {F.relu_, torch.relu_, torch.Tensor.relu_}


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, width: Tensor, mode: SmoothRelus) -> Tensor:
        ctx.save_for_backward(x, width)
        ctx.mode = mode
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if not ctx.mode.curved:
            return None, None, None
        x, width = ctx.saved_tensors
        return grad * (x.abs() < width) / (2 * width), None, None


class _Relu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mode: SmoothRelus) -> Tensor:
        ctx.save_for_backward(x)
        ctx.mode = mode
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        width = x.detach().square().mean().sqrt() * (ctx.mode.noise * sqrt(pi / 8))
        width = width.clamp(min=torch.finfo(x.dtype).tiny)
        step: Tensor = _Step.apply(x, width, ctx.mode)  # type: ignore[no-untyped-call]
        return grad * step, None


class SmoothRelus(TorchFunctionMode):
    """While this lasts, the slope of ReLUs is differentiable; `noise` is the expected size of errors in rms units."""

    def __init__(self, noise: float) -> None:
        super().__init__()
        self.noise = noise
        self.count = 0
        self.curved = True  # switched off, ReLUs have no second derivative, as usual

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _RELUS or func in _IN_PLACE:
            x = args[0] if args else kwargs["input"]
            writes = func in _IN_PLACE or kwargs.get("inplace") is True or (func is F.relu and args[1:] == (True,))
            if isinstance(x, Tensor) and x.requires_grad:
                self.count += 1
                result: Tensor = _Relu.apply(x.clone() if writes else x, self)  # type: ignore[no-untyped-call]
                return x.copy_(result) if writes else result
        return func(*args, **kwargs)
