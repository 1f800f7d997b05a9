"""Quantizer arithmetic compiled with torch.compile, inside a model that is not compiled."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from bitwright.quantizers.base import Quantizer


_log = logging.getLogger(__name__)

SMALL = 1 << 16
"""Smaller tensors are not passed to compiled code."""

_VARIANTS = 64  # per function: ranks, dtypes, devices, with and without gradients, formats
_WIDTHS = {"AVX512": 512, "AVX2": 256, "DEFAULT": 1}  # bits
_broken: list[str] = []  # why compiling was disabled in this process


def for_this_cpu() -> dict[str, Any]:
    """Options of torch.compile that specify the vector width and thereby make it part of the cache key.

    Otherwise, code generated for one vector width may be taken from a shared or old cache and built for another width.
    It would write beyond the end of its tensors.
    """
    width = _WIDTHS.get(torch.backends.cpu.get_cpu_capability())
    return {} if width is None else {"cpp.simdlen": width}


def can_run_compiled() -> bool:
    """Whether compiled code can be called in the current context."""
    # an outer torch.compile or torch.export inlines the function instead
    return not torch.compiler.is_compiling() and not _broken


def is_worthwhile(x: Tensor) -> bool:
    """Whether the tensor is large enough for compiled code."""
    return x.numel() >= SMALL and can_run_compiled()


class CompiledKernel:
    """A function of tensors and its compiled version."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.twin: Callable[..., Any] | None = None

    def compiled(self, *inputs: Any) -> Any:
        """Run the compiled version, or the function itself if compilation fails."""
        if self.twin is None:
            # fullgraph: too many variants raise an error, which is reported, instead of silently running eagerly
            self.twin = torch.compile(  # type: ignore[call-overload]  # torch's overloads lack the two limits
                self.function,
                dynamic=True,
                fullgraph=True,
                recompile_limit=_VARIANTS,
                isolate_recompiles=True,
                options=for_this_cpu(),
            )
        twin: Any = self.twin
        if not _broken:
            try:
                return twin(*inputs)
            except Exception as error:  # compilers raise many types; the function itself reports invalid inputs
                give_up(error)
        return self.function(*inputs)


def give_up(error: Exception) -> None:
    """Disable compiled arithmetic in this process, and log a warning once."""
    if not _broken:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        _broken.append(reason)
        _log.warning(
            "the quantizers' arithmetic can't be compiled here and runs uncompiled: same numbers, but slower (%s)",
            reason,
        )


def dense(x: Tensor) -> bool:
    """Whether the elements are dense in memory, in one of the usual memory formats."""
    if x.is_contiguous():
        return True
    format = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    return format is not None and x.is_contiguous(memory_format=format)


class Frame:
    """How compiled code views a tensor: as one row, or as a matrix with one row per scale (`rows` of them).

    Using one or two axes for all shapes limits the number of compiled variants. The results are not views for autograd:
    otherwise there would be a variant per base tensor, and models couldn't modify the results in place.
    """

    def __init__(self, x: Tensor, rows: int = 0) -> None:
        self.shape, self.stride, self.rows = x.shape, x.stride(), rows

    def view(self, x: Tensor) -> Tensor:
        """View `x`, or another tensor of the same shape."""
        if x.stride() != self.stride:
            x = torch.empty_strided(self.shape, self.stride, dtype=x.dtype, device=x.device).copy_(x)
        return (x.view(self.rows, -1) if self.rows else x.as_strided((x.numel(),), (1,))).detach()

    def back(self, x: Tensor) -> Tensor:
        """The inverse of `view`."""
        return x.as_strided(self.shape, self.stride).detach()


# The quantizers of a class share compiled code. Different codes and layouts are variants of it.
_kernels: dict[tuple[type, bool], CompiledKernel] = {}


def _plain(quantizer: Quantizer, x: Tensor) -> Tensor:
    return quantizer.quantize(x)


def _after_relu(quantizer: Quantizer, x: Tensor) -> Tensor:
    return quantizer.quantize(torch.relu(x))


def _copy(function: Any, name: str) -> Callable[..., Tensor]:
    """Copy a function: torch counts variants per code object."""
    code = function.__code__.replace(co_name=f"{function.__name__}_{name}")
    return FunctionType(code, function.__globals__)


def quantize_compiled(quantizer: Quantizer, x: Tensor, *, relu: bool) -> Tensor:
    """`quantizer.quantize(x)` or `quantizer.quantize(relu(x))` in compiled code."""
    key = (type(quantizer), relu)
    kernel = _kernels.get(key)
    if kernel is None:
        kernel = _kernels[key] = CompiledKernel(_copy(_after_relu if relu else _plain, type(quantizer).__name__))
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
    """Merge axes to reduce the number of variants, where this doesn't change which elements share a scale."""
    layout = quantizer.layout
    if layout.granularity == "tensor":
        return Frame(x) if dense(x) else None
    first = layout.granularity == "channel" and layout.axis == 0 and x.is_contiguous()
    return Frame(x, x.shape[0]) if first else None
