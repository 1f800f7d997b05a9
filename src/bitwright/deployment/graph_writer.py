"""The ONNX graph of a program while it is written, and the registry of operators that write themselves into it."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor, from_torch_dtype
from torch import Tensor, fx

__all__ = ["NodeWriter", "Untranslated", "emitter_of", "ir_shape", "opname", "register"]

OPSET = 21
_KEPT = 1 << 16  # bytes of a folded constant that isn't computed again
_SYMBOLIC = {operator.add: "Add", operator.sub: "Sub", operator.mul: "Mul", operator.floordiv: "Div"}

Emitter = Callable[..., Any]
_EMITTERS: dict[str, Emitter] = {}


class Untranslated(Exception):
    """The program has an operator, or a form of one, that this module can't write."""


def register(*names: str) -> Callable[[Emitter], Emitter]:
    """Use a function for operators: `add`, or `add.Tensor` for one overload.

    It gets the writer and the operator's arguments by the names in its schema, and `self` as `x`.
    """

    def add(emitter: Emitter) -> Emitter:
        for name in names:
            _EMITTERS[name] = emitter
        return emitter

    return add


def emitter_of(target: Any) -> Emitter | None:
    """The function for an operator of torch; an operator that writes into its input has that of the pure one."""
    schema = getattr(target, "_schema", None)
    if schema is None or not schema.name.startswith("aten::"):
        return None
    name = schema.name.removeprefix("aten::")
    found = _EMITTERS.get(f"{name}.{target._overloadname}") or _EMITTERS.get(name)
    if found is None and name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
        found = _EMITTERS.get(f"{name}.{target._overloadname}") or _EMITTERS.get(name)
    return found


def opname(node: fx.Node) -> str:
    """The name of torch's operator without its overload: `conv2d`."""
    return str(getattr(node.target, "_opname", ""))


class NodeWriter(ABC):
    """An ONNX graph to which operators add their nodes: `w("Add", x, y)`."""

    def __init__(self) -> None:
        self.graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET, "bitwright": 1}, name="main_graph")
        self.node: fx.Node
        """The operator that is written now."""
        self.unnamed: set[ir.Value] = set()
        """Intermediate values of an operator."""
        self.count = 0
        self._made: dict[Any, tuple[ir.Value, ...]] = {}
        self._sizes: dict[str, ir.Value] = {}
        self._constants: dict[Any, ir.Value] = {}

    @abstractmethod
    def value(self, node: fx.Node) -> Any:
        """The ONNX value of a node; a tuple for several results."""

    @abstractmethod
    def data(self, node: Any) -> Tensor | None:
        """The tensor behind an argument that depends on no input, or None."""

    def __call__(
        self, op: str, *inputs: ir.Value | None, dtype: ir.DataType | None = None, outputs: int = 1, **attributes: Any
    ) -> Any:
        """Add a node and return its output, or a tuple of `outputs`. Equal nodes exist once."""
        given = {name: value for name, value in attributes.items() if value is not None}
        hashable = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
        key = (op, *(id(one) for one in inputs), *sorted(hashable.items()), dtype, outputs)
        if key not in self._made:
            attrs = [ir.convenience.convert_attribute(name, value) for name, value in given.items()]
            node = ir.Node("", op, inputs, attrs, num_outputs=outputs)
            for output in node.outputs:
                self.count += 1
                output.name = f"{self.node.name}_v{self.count}"
                self.unnamed.add(output)
                kind = dtype or next((one.dtype for one in inputs if one is not None), None)
                if kind is not None:
                    output.dtype = kind
            self.graph.append(node)
            self._made[key] = tuple(node.outputs)
        made = self._made[key]
        return made[0] if outputs == 1 else made

    def refuse(self, reason: str = "") -> NoReturn:
        """Stop: this form of the operator isn't known."""
        raise Untranslated(f"{self.node.target}" + (f" ({reason})" if reason else ""))

    @property
    def dtype(self) -> torch.dtype:
        """The type of the current operator's (first) result."""
        found = self.meta(self.node)
        kind: torch.dtype = (found[0] if isinstance(found, (tuple, list)) else found).dtype
        return kind

    def meta(self, node: fx.Node) -> Any:
        """The traced value of a node: a tensor without data, or a size."""
        if "val" not in node.meta:
            self.refuse("no traced value")
        return node.meta["val"]

    def shape(self, node: fx.Node) -> tuple[Any, ...]:
        """The sizes of a tensor: integers, and torch.SymInt for dynamic ones."""
        return tuple(self.meta(node).shape)

    @property
    def operator(self) -> str:
        """The name of the current operator, without its overload."""
        return opname(self.node)

    def rank(self, node: fx.Node) -> int:
        """The number of axes of a tensor."""
        return len(self.meta(node).shape)

    def axis(self, dim: int, rank: int) -> int:
        """A dimension counted from the start."""
        return dim % rank if rank else 0

    def constant(self, array: Any, dtype: torch.dtype | None = None) -> ir.Value:
        """A constant; equal ones exist once."""
        tensor = torch.as_tensor(array, dtype=dtype)
        array = TorchTensor(tensor).numpy()
        key = (tensor.dtype, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self.register(f"const_{len(self._constants)}", TorchTensor(tensor))
        return self._constants[key]

    def ints(self, *numbers: int) -> ir.Value:
        """A vector of integers."""
        return self.constant(np.array(numbers, np.int64))

    def tensor(self, arg: Any, dtype: torch.dtype | None = None) -> Any:
        """The value of an argument: a tensor, a number or a size, converted to `dtype`."""
        if isinstance(arg, fx.Node):
            found = self.meta(arg)
            if isinstance(found, Tensor):
                return self.cast(self.value(arg), found.dtype, dtype)
            if isinstance(found, (torch.SymInt, int)) and not isinstance(found, bool):
                return self.scalar(arg, dtype or torch.int64)
            self.refuse("an argument that is neither a tensor nor a size")
        if not isinstance(arg, (bool, int, float)) or dtype is None:
            self.refuse(f"an argument of type {type(arg).__name__}")
        return self.constant(np.array(arg), dtype)

    def scalar(self, size: Any, dtype: torch.dtype = torch.int64) -> ir.Value:
        """A size as a tensor without axes."""
        found = self.size(size)
        if isinstance(found, int):
            return self.constant(np.array(found), dtype)
        converted: ir.Value = self.cast(self("Squeeze", found, self.ints(0)), torch.int64, dtype)
        return converted

    def cast(self, value: Any, source: torch.dtype, dtype: torch.dtype | None) -> Any:
        """Convert a value to another type."""
        if dtype is None or dtype == source:
            return value
        kind = from_torch_dtype(dtype)
        return self("Cast", value, dtype=kind, to=kind.value)

    def lazy(self, name: str, compute: Callable[[], Tensor], like: Tensor) -> ir.Value:
        """A constant with values that are computed when they are written."""
        kind = from_torch_dtype(like.dtype)

        def tensor() -> TorchTensor:
            with torch.no_grad():
                return TorchTensor(compute().detach(), name=name)

        kept = like.numel() * like.element_size() <= _KEPT
        return self.register(name, ir.LazyTensor(tensor, kind, ir.Shape(tuple(like.shape)), name=name, cache=kept))

    def register(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        """Add an initializer."""
        while name in self.graph.initializers:
            name += "_"
        tensor.name = name
        shape = ir.Shape([int(size) for size in tensor.shape.numpy()])
        value = ir.Value(name=name, const_value=tensor, shape=shape, type=ir.TensorType(tensor.dtype))
        self.graph.register_initializer(value)
        return value

    # -- sizes ----------------------------------------------------------------------------------------------

    def size(self, arg: Any) -> int | ir.Value:
        """A size: an integer, or a vector with one element that is computed at run time."""
        if isinstance(arg, bool) or not isinstance(arg, (int, fx.Node)):
            self.refuse(f"a size of type {type(arg).__name__}")
        if isinstance(arg, int):
            return arg
        found = self.meta(arg)
        if isinstance(found, torch.SymInt) and not found.node.expr.is_number:
            return self._symbolic(arg, str(found.node.expr))
        if not isinstance(found, (int, torch.SymInt)):
            self.refuse("a size that is a tensor")
        return int(found)

    def _symbolic(self, node: fx.Node, expression: str) -> ir.Value:
        if expression not in self._sizes:
            if node.target is torch.ops.aten.sym_size.int:
                source, given = cast("tuple[fx.Node, int]", node.args)
                dim = self.axis(given, self.rank(source))
                made = self("Shape", self.value(source), dtype=ir.DataType.INT64, start=dim, end=dim + 1)
            elif node.target in _SYMBOLIC:
                sides = [self._vector(arg) for arg in node.args]
                made = self(_SYMBOLIC[node.target], *sides)
            else:
                raise Untranslated(str(node.target))
            self._sizes[expression] = made
        return self._sizes[expression]

    def _vector(self, arg: Any) -> ir.Value:
        found = self.size(arg)
        return self.ints(found) if isinstance(found, int) else found

    def dim(self, node: fx.Node, index: int) -> int | ir.Value:
        """The size of one axis of a tensor."""
        size = self.shape(node)[index]
        if isinstance(size, int):
            return size
        expression = str(size.node.expr)
        if size.node.expr.is_number:
            return int(size)
        if expression not in self._sizes:
            value = self.value(node)
            self._sizes[expression] = self("Shape", value, dtype=ir.DataType.INT64, start=index, end=index + 1)
        return self._sizes[expression]

    def vector(self, sizes: Sequence[Any]) -> ir.Value:
        """Sizes as one vector: constant if all are integers."""
        found = [self.size(size) if isinstance(size, (int, fx.Node)) else size for size in sizes]
        numbers = [size for size in found if isinstance(size, int)]
        if len(numbers) == len(found):
            return self.ints(*numbers)
        parts = [self.ints(size) if isinstance(size, int) else size for size in found]
        return parts[0] if len(parts) == 1 else self("Concat", *parts, axis=0)

    @staticmethod
    def same(one: Any, other: Any) -> bool:
        """Whether two sizes are always equal."""
        if isinstance(one, int) or isinstance(other, int):
            return isinstance(one, int) and isinstance(other, int) and one == other
        return bool(one.node.expr == other.node.expr)

    def reshape(self, source: fx.Node, target: Sequence[Any], sizes: Sequence[Any] | None = None) -> Any:
        """Reshape a tensor; `target` is the traced shape of the result, `sizes` the arguments with its sizes."""
        value, shape = self.value(source), self.shape(source)
        if len(shape) == len(target) and all(map(self.same, shape, target)):
            return value
        if any(isinstance(size, int) and size == 0 for size in target):
            self.refuse("an empty tensor")
        known = [isinstance(size, int) for size in target]
        copied = [
            not fixed and index < len(shape) and self.same(shape[index], size)
            for index, (fixed, size) in enumerate(zip(known, target, strict=True))
        ]
        open_ = [index for index in range(len(target)) if not known[index] and not copied[index]]
        if len(open_) <= 1:
            numbers = [
                int(size) if fixed else (0 if copy else -1)
                for size, fixed, copy in zip(target, known, copied, strict=True)
            ]
            return self("Reshape", value, self.ints(*numbers))
        if sizes is None or len(sizes) != len(target):
            self.refuse("several unknown sizes")
        found = [size if fixed else given for size, fixed, given in zip(target, known, sizes, strict=True)]
        return self("Reshape", value, self.vector(found), allowzero=None if -1 in found else 1)


def ir_shape(found: Tensor) -> ir.Shape:
    """The traced sizes of a tensor; dynamic ones are expressions."""
    traced: tuple[Any, ...] = tuple(found.shape)
    sizes: list[int | str] = [size if isinstance(size, int) else str(size) for size in traced]
    return ir.Shape(sizes)
