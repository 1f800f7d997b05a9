"""Keys of measured costs. Operator calls with the same key cost the same on one device.

Profiles store a key as text: `conv2d(input=f32[32,3,32,32], weight=f32[16,3,3,3]+, None, [1, 1], [1, 1], [1, 1], 1)`.
Each port has a dtype and a shape. A `+` marks tensors that require a gradient. Strides follow an `@` if the tensor is
not contiguous. Other arguments are written as in Python. `CostKey` gives access to the parts of such a text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

from torch import Tensor

from bitwright.core.tensor_tree import map_tensors
from bitwright.graph.operators import is_inplace, locate

_SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64", "int64": "i64", "int32": "i32"}
_BYTES = {"float64": 8, "int64": 8, "complex64": 8, "float16": 2, "bfloat16": 2, "int16": 2, "int8": 1, "uint8": 1}
FLOATS = ("float32", "bfloat16", "float16", "float64")
LOSS = "loss:"  # the prefix of the key of a loss
_TOKEN = re.compile(r"«([0-9]{1,6})»")


def is_loss(text: str) -> bool:
    """Whether this key is a loss, not an operator."""
    return text.startswith(LOSS)


@dataclass(frozen=True)
class TensorSpec:
    """The shape, strides and dtype of a tensor, without its values."""

    shape: tuple[int, ...]
    dtype: str
    grad: bool = False
    strides: tuple[int, ...] | None = None
    """None if the tensor is contiguous."""

    @staticmethod
    def of(tensor: Tensor) -> TensorSpec:
        """The description of a tensor."""
        strides = None if tensor.is_contiguous() else tuple(tensor.stride())
        return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.requires_grad, strides)

    @property
    def elements(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Its size in bytes, without gaps between elements."""
        return self.elements * (1 if self.dtype == "bool" else _BYTES.get(self.dtype, 4))

    @property
    def is_float(self) -> bool:
        """Whether it is a floating-point tensor, which can be cast."""
        return self.dtype in FLOATS

    @property
    def possible(self) -> bool:
        """Whether a tensor can have this shape; checks values from files."""
        sizes = (*self.shape, *(self.strides or ()))
        same = self.strides is None or len(self.strides) == len(self.shape)
        return same and all(0 <= size < 2**40 for size in sizes) and self.elements < 2**50

    def compact(self) -> TensorSpec:
        """The result of an elementwise operation: without gaps, with the same order of axes if that fills memory."""
        if self.strides is None:
            return self
        expected = 1
        for stride, size in sorted(zip(self.strides, self.shape, strict=True)):
            if size != 1 and stride != expected:
                return replace(self, strides=None)
            expected *= size
        return self

    def with_(self, *, grad: bool | None = None, dtype: str | None = None) -> TensorSpec:
        """A copy with these fields changed."""
        return replace(self, grad=self.grad if grad is None else grad, dtype=dtype or self.dtype)

    def __str__(self) -> str:
        axes = ",".join(map(str, self.shape))
        order = "" if self.strides is None else f"@{','.join(map(str, self.strides))}"
        return f"{_SHORT.get(self.dtype, self.dtype)}[{axes}]{order}{'+' if self.grad else ''}"


_LONG = {short: name for name, short in _SHORT.items()}
_TENSOR = re.compile(r"(?<![\w.])(\w+)\[((?:\d{1,15}(?:,\d{1,15})*)?)\](?:@(\d{1,15}(?:,\d{1,15})*))?(\+?)")


def _tensor(match: re.Match[str]) -> TensorSpec:
    shape, strides = ((tuple(map(int, part.split(","))) if part else ()) for part in (match[2], match[3]))
    return TensorSpec(shape, _LONG.get(match[1], match[1]), bool(match[4]), strides if match[3] else None)


@dataclass(frozen=True)
class CostKey:
    """The parts of a key: an operator call with its tensors, or one tensor (of a cast or a gradient).

    >>> key = CostKey.parse("linear(input=f32[64,24]@192,1+, weight=f32[8,24]+, None)")
    >>> key.kind, key.batch_size, key.tensors[1].shape
    ('linear', 64, (8, 24))
    >>> print(key.without_strides())
    linear(input=f32[64,24]+, weight=f32[8,24]+, None)
    """

    words: tuple[str, ...]
    """The text between the tensors; one more than there are tensors."""
    tensors: tuple[TensorSpec, ...]

    @staticmethod
    @lru_cache(maxsize=1 << 15)
    def parse(text: str) -> CostKey:
        """Parse the text of a key, as `CallSpec.key` and `str(TensorSpec)` write it."""
        found = list(_TENSOR.finditer(text))
        ends = [0, *(match.end() for match in found)]
        starts = [*(match.start() for match in found), len(text)]
        words = tuple(text[end:start] for end, start in zip(ends, starts, strict=True))
        return CostKey(words, tuple(map(_tensor, found)))

    def __str__(self) -> str:
        return "".join(f"{word}{tensor}" for word, tensor in zip(self.words, (*self.tensors, ""), strict=True))

    @property
    def is_call(self) -> bool:
        """Whether this is an operator call or a loss, and not a single tensor."""
        return "(" in self.words[0]

    @property
    def is_loss(self) -> bool:
        """Whether this is the loss function."""
        return is_loss(self.words[0])

    @property
    def kind(self) -> str:
        """The operator (`conv2d`, also for its in-place form), `loss`, or an empty string for a single tensor."""
        return self.words[0].partition("(")[0].partition(":")[0].removesuffix("_") if self.is_call else ""

    @property
    def batch_size(self) -> int | None:
        """The first size of the first argument, if that is a tensor with a shape."""
        first = self.words[0].partition("(")[2]
        if not self.is_call or not self.tensors or "," in first or not self.tensors[0].shape:
            return None
        return self.tensors[0].shape[0]

    @property
    def is_channels_last_conv(self) -> bool | None:
        """Whether a 2-D convolution reads channels-last images; None for other calls and where both orders agree."""
        if self.kind != "conv2d" or not self.tensors or len(self.tensors[0].shape) != 4:
            return None
        _, channels, height, width = self.tensors[0].shape
        if channels <= 1 or height * width <= 1:
            return None
        strides = self.tensors[0].strides
        return strides is not None and strides[1:2] == (1,)

    def without_strides(self) -> CostKey:
        """The same call on contiguous tensors."""
        return CostKey(self.words, tuple(replace(tensor, strides=None) for tensor in self.tensors))

    def without_batch_size(self) -> CostKey:
        """The same call with 0 as its batch size, to find calls that differ in the batch size only."""
        if self.batch_size is None or len(self.tensors[0].shape) < 2:
            return self
        first = replace(self.tensors[0], shape=(0, *self.tensors[0].shape[1:]))
        return CostKey(self.words, (first, *self.tensors[1:]))

    def shapes_only(self) -> CostKey:
        """The same call without strides and dtypes, which differ between plans and under autocast."""
        return CostKey(self.words, tuple(replace(tensor, strides=None, dtype="any") for tensor in self.tensors))


@dataclass(frozen=True)
class CallSpec:
    """One operator call: its ports, and the text around them."""

    kind: str
    ports: tuple[tuple[str, TensorSpec], ...]
    template: str
    inplace: bool = False

    def key(self, changed: Mapping[str, TensorSpec] | None = None) -> str:
        """The key as text; `changed` replaces recorded tensors at these ports."""
        specs = [(name, (changed or {}).get(name, spec)) for name, spec in self.ports]
        return _TOKEN.sub(lambda match: "{}={}".format(*specs[int(match[1])]), self.template)

    @property
    def tokens(self) -> list[int]:
        """The indices of the ports in the template."""
        return [int(found) for found in _TOKEN.findall(self.template)]

    def port(self, name: str) -> TensorSpec | None:
        """The tensor at a port."""
        return dict(self.ports).get(name)


def describe(kind: str, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallSpec:
    """Describe a call by its kind, tensors and other arguments.

    >>> import torch
    >>> print(describe("add", torch.add, (torch.ones(2, 3), 1.0), {}).key())
    add(input=f32[2,3], 1.0)
    """
    found = locate(kind, func, args, dict(kwargs))
    numbers = {id(tensor): number for number, (_, _, tensor) in reversed(list(enumerate(found)))}
    ports = tuple((port, TensorSpec.of(tensor)) for port, _, tensor in found)

    def token(tensor: Tensor) -> Any:
        number = numbers.get(id(tensor))
        return _Words(str(TensorSpec.of(tensor)) if number is None else f"«{number}»")

    shown_args, shown_kwargs = map_tensors((tuple(args), dict(kwargs)), token)
    words = [_show(value) for value in shown_args]
    for name, value in sorted(shown_kwargs.items()):  # the text of a port includes its name
        words.append(_show(value) if isinstance(value, _Words) else f"{name}={_show(value)}")
    inplace = is_inplace(func) or kwargs.get("inplace") is True
    return CallSpec(kind, ports, f"{kind}{'_' if inplace else ''}({', '.join(words)})", inplace)


class _Words(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


_PLAIN = (int, float, bool, str, type(None), slice, type(...), complex)


def _show(value: Any) -> str:
    if isinstance(value, _Words):
        return str(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_show, value))}]"
    if isinstance(value, _PLAIN) or type(value).__module__.startswith("torch"):
        return repr(value)
    return type(value).__name__  # the repr of an object may contain its address
