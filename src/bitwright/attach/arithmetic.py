"""Any quantizer's `quantize`, compiled as it is written."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from bitwright.attach.compiled import Frame, Kernel, dense

if TYPE_CHECKING:
    from bitwright.attach.quantizer import Quantizer

# A class's quantizers share compiled code; what differs between them (codes, layout) makes variants.
_kernels: dict[tuple[type, bool], Kernel] = {}


def _plain(quantizer: Quantizer, x: Tensor) -> Tensor:
    return quantizer.quantize(x)


def _after_relu(quantizer: Quantizer, x: Tensor) -> Tensor:
    return quantizer.quantize(torch.relu(x))


def _copy(function: Any, name: str) -> Callable[..., Tensor]:
    """A function of its own: torch counts variants by code object."""
    code = function.__code__.replace(co_name=f"{function.__name__}_{name}")
    return FunctionType(code, function.__globals__)


def quantize_compiled(quantizer: Quantizer, x: Tensor, *, relu: bool) -> Tensor:
    """`quantizer.quantize(x)`, or that of relu(x), in compiled code."""
    key = (type(quantizer), relu)
    kernel = _kernels.get(key)
    if kernel is None:
        kernel = _kernels[key] = Kernel(_copy(_after_relu if relu else _plain, type(quantizer).__name__))
    frame = _frame(quantizer, x)
    if frame is None:
        result: Tensor = kernel.compiled(quantizer, x)
        return result
    result = kernel.compiled(quantizer, _Viewed.apply(x, frame))  # type: ignore[no-untyped-call]
    return cast(Tensor, _ViewedBack.apply(result, frame))  # type: ignore[no-untyped-call]


class _Viewed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, frame: Frame) -> Tensor:
        ctx.frame = frame
        return frame.view(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _ViewedBack.apply(grads[0], ctx.frame), None  # type: ignore[no-untyped-call]


class _ViewedBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, frame: Frame) -> Tensor:
        ctx.frame = frame
        return frame.back(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Viewed.apply(grads[0], ctx.frame), None  # type: ignore[no-untyped-call]


def _frame(quantizer: Quantizer, x: Tensor) -> Frame | None:
    """Fewer axes are fewer variants; the arithmetic can't tell where scales lie the same."""
    layout = quantizer.layout
    if layout.granularity == "tensor":
        return Frame(x) if dense(x) else None
    first = layout.granularity == "channel" and layout.axis == 0 and x.is_contiguous()
    return Frame(x, x.shape[0]) if first else None
