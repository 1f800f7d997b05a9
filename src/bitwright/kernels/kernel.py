"""The kernel interface, and the arguments of the calls that kernels replace."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from bitwright.core.registry import KERNELS
from bitwright.graph import Op
from bitwright.plan import ComputeSpec

_LINEAR = ("input", "weight", "bias")
_CONV = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_EMBEDDING = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
#: The argument names of each function, in order. A tensor's method has no name for the tensor itself.
_NAMES: dict[Any, tuple[str, ...]] = {
    F.linear: _LINEAR,
    F.conv2d: _CONV,
    torch.conv2d: _CONV,
    F.conv1d: _CONV,
    torch.conv1d: _CONV,
    F.embedding: _EMBEDDING,
    torch.embedding: ("weight", "indices", "padding_idx", "scale_grad_by_freq", "sparse"),
    torch.matmul: ("input", "other"),
    torch.mm: ("input", "mat2"),
    torch.bmm: ("input", "mat2"),
    Tensor.matmul: ("input", "other"),
    Tensor.__matmul__: ("input", "other"),
    Tensor.__rmatmul__: ("other", "input"),
    Tensor.mm: ("input", "mat2"),
    Tensor.bmm: ("input", "mat2"),
}
#: Aliases of argument names.
_SAME = {"mat2": "other", "indices": "input"}


def arguments(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments by their names in torch.nn.functional and torch.matmul; None for unsupported calls.

    >>> a, b = torch.ones(1, 2, 3), torch.ones(1, 3, 4)
    >>> list(arguments(torch.bmm, (a,), {"mat2": b})), arguments(torch.bmm, (a, b), {"out": None})
    (['input', 'other'], None)
    """
    names = _NAMES.get(func)
    if names is None or len(args) > len(names) or not set(kwargs) <= set(names[len(args) :]):
        return None
    return {_SAME.get(name, name): value for name, value in (*zip(names, args, strict=False), *kwargs.items())}


def each_axis(value: Any, dims: int) -> tuple[int, ...]:
    """Expand a stride, padding or dilation to one value per axis."""
    return (value,) * dims if isinstance(value, int) else tuple(value) * (dims if len(value) == 1 else 1)


def padded(input: Tensor, weight: Tensor, padding: Any, dilation: tuple[int, ...]) -> tuple[Tensor, tuple[int, ...]]:
    """Convert `same` and `valid` to numbers per axis. An odd number of zeros for `same` is padded explicitly first."""
    dims = weight.dim() - 2
    if padding == "valid":
        return input, (0,) * dims
    if padding != "same":
        return input, each_axis(padding, dims)
    sides = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    if any(side % 2 for side in sides):
        input = F.pad(input, [part for side in reversed(sides) for part in (0, side % 2)])
    return input, tuple(side // 2 for side in sides)


@dataclass(frozen=True, eq=False)
class Convolution:
    """The arguments of a convolution with numbers per axis; `input` may have explicit zeros around it."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def shape(self) -> tuple[Any, ...]:
        """Stride, padding, dilation and groups."""
        return self.stride, self.padding, self.dilation, self.groups

    @classmethod
    def of(
        cls,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Convolution:
        """Read the arguments of `torch.nn.functional.conv1d` or `conv2d`."""
        dims = weight.dim() - 2
        apart = each_axis(dilation, dims)
        input, sides = padded(input, weight, padding, apart)
        return cls(input, weight, bias, each_axis(stride, dims), sides, apart, groups)


def matmul_operands(input: Tensor, other: Tensor) -> tuple[Tensor, Tensor] | None:
    """Both operands with the same leading axes; None for products with a vector."""
    if min(input.dim(), other.dim()) < 2:
        return None
    lead = torch.broadcast_shapes(input.shape[:-2], other.shape[:-2])
    return input.expand(*lead, *input.shape[-2:]), other.expand(*lead, *other.shape[-2:])


def embedding_arguments(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> tuple[Tensor, Tensor, int] | None:
    """Index, table and the row without a gradient (-1: none); None for options that kernels don't support."""
    if max_norm is not None or scale_grad_by_freq or sparse:
        return None
    # torch accepts negative indexes, but in its backward −1 means no row
    return input, weight, -1 if padding_idx is None else padding_idx % weight.shape[0]


class Kernel(ABC):
    """Runs operators of certain kinds in one precision.

    A kernel takes the model's call and returns its result. Autograd works through it.
    """

    name: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]]
    named_kinds: ClassVar[tuple[str, ...]] = ()
    """Additional kinds, which it runs only if a plan names the operator. Patterns and planners leave them in float."""
    compiles: ClassVar[bool] = True
    """Whether torch.compile of the complete model can trace it."""
    has_compiled_arithmetic: ClassVar[bool] = False
    """Whether it compiles its own arithmetic, which loads torch's compiler."""

    def __init__(self, spec: ComputeSpec, *, simulate: bool = False) -> None:
        self.spec = spec
        self.simulate = simulate
        self.floats: dict[str, str] = {}
        """Requested low-precision backward products that stay float, with the reason. Set by a call."""

    @classmethod
    def refuses(cls, op: Op, spec: ComputeSpec) -> str | None:
        """Why the kernel can't run this operator; None if it can."""
        return None if op.kind in cls.kinds else f"{cls.name} has no kernel for {op.kind}"

    @classmethod
    def refuses_named(cls, op: Op, spec: ComputeSpec) -> str | None:
        """Like `refuses`, for an operator that a plan names."""
        return None if op.kind in cls.named_kinds else cls.refuses(op, spec)

    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        """Why it can only be simulated on this device; None if it runs there."""
        return None

    @classmethod
    def missing_for(cls, kind: str, device: torch.device) -> str | None:
        """Like `missing`, for operators of one kind."""
        return cls.missing(device)

    @classmethod
    def engine(cls, device: torch.device) -> str | None:
        """The library that multiplies on this device; None: torch's own operators do."""
        return None

    @classmethod
    def rounded(cls, weight: Tensor, kind: str, spec: ComputeSpec) -> Tensor | None:
        """The weight as rounded by the forward product, for indicators that only use weights; None if unknown."""
        return None

    @classmethod
    def seconds(cls, kind: str, shapes: Mapping[str, tuple[int, ...]], spec: ComputeSpec) -> tuple[float, float] | None:
        """Estimated forward and backward seconds of a call without a profile; None if unknown."""
        return None

    @abstractmethod
    def __call__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call."""


Made = TypeVar("Made", bound=type[Kernel])


def kernel(name: str, *kinds: str) -> Callable[[Made], Made]:
    """Register a class as a kernel with this name for operators of these kinds."""

    def register(made: Made) -> Made:
        made.name, made.kinds = name, kinds
        KERNELS.register(name, made)
        return made

    return register
