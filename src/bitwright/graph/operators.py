"""Kinds, ports, channel axes and multiply-accumulates of torch functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import isqrt, prod
from types import MethodWrapperType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Aliases of operators. Key: torch's name without dunders, in-place and reflected prefixes.
_ALIASES = {
    # torch.nn.functional's name, and that of the equivalent operator that transformers uses under torch.export
    "grouped_mm": "_grouped_mm",
    "grouped_mm_fallback": "_grouped_mm",
    "truediv": "div",
    "true_divide": "div",
    "divide": "div",
    "multiply": "mul",
    "subtract": "sub",
    "rsub": "sub",
    "mm": "matmul",
    "bmm": "matmul",
    # older names of torch.mm; the three are equal as Python objects, so any of them may be found first
    "dsmm": "matmul",
    "spmm": "matmul",
    "concat": "cat",
    "concatenate": "cat",
    "absolute": "abs",
    "negative": "neg",
    "swapaxes": "transpose",
    "_max_pool1d": "max_pool1d",
    "_max_pool2d": "max_pool2d",
    "_max_pool3d": "max_pool3d",
    "max_pool1d_with_indices": "max_pool1d",
    "max_pool2d_with_indices": "max_pool2d",
    "max_pool3d_with_indices": "max_pool3d",
    "log_sigmoid": "logsigmoid",
    "_threshold": "threshold",
    "rnn_tanh": "rnn",
    "rnn_relu": "rnn",
    "rnn_tanh_cell": "rnn_cell",
    "rnn_relu_cell": "rnn_cell",
}
# Dunder operators and their functions: __iadd__, __radd__ and __add__ are all "add".
_BINARY = {"add", "sub", "mul", "truediv", "div", "matmul", "pow", "floordiv", "mod", "and", "or", "xor"}
# Attributes that return a tensor derived from the object: recorded, but without a site.
_VIEW_ATTRIBUTES = {"T", "mT", "H", "mH", "real", "imag", "data"}
# Calls that query a tensor without making a new one. Excludes `detach`: its result is an activation and must keep its
# producer.
_IGNORED = {
    "requires_grad_",
    "retain_grad",
    "register_hook",
    "numpy",
    "tolist",
    "item",
    "size",
    "dim",
}
# Calls that give Python code access to a tensor's values, or to a size that depends on them.
_READERS = {
    *("item", "tolist", "numpy", "__array__", "__dlpack__", "__bool__", "__int__", "__float__", "__complex__"),
    *("__index__", "__contains__", "is_nonzero", "equal", "allclose", "nonzero", "argwhere", "masked_select"),
    *("unique", "unique_consecutive", "bincount", "histc"),
}

# kind → {positional index: port}; the port is also the keyword in torch.nn.functional.
_WEIGHTED = {0: "input", 1: "weight", 2: "bias"}
PORTS: dict[str, dict[int, str]] = {
    **dict.fromkeys(["conv1d", "conv2d", "conv3d", "linear"], _WEIGHTED),
    **dict.fromkeys(["conv_transpose1d", "conv_transpose2d", "conv_transpose3d"], _WEIGHTED),
    "embedding": {0: "input", 1: "weight"},
    "prelu": {0: "input", 1: "weight"},
    "batch_norm": {0: "input", 1: "running_mean", 2: "running_var", 3: "weight", 4: "bias"},
    "layer_norm": {0: "input", 2: "weight", 3: "bias"},
    "rms_norm": {0: "input", 2: "weight"},
    "group_norm": {0: "input", 2: "weight", 3: "bias"},
    "addmm": {0: "bias", 1: "input", 2: "weight"},
    "scaled_dot_product_attention": {0: "query", 1: "key", 2: "value", 3: "attn_mask"},
}
# torch's keyword names that differ from the port's name.
_KEYWORDS = {"addmm": {"input": "bias", "mat1": "input", "mat2": "weight"}}
# kind → (port, output-channel axis, reduction axis) of the weight.
_CHANNELS: dict[tuple[str, str], tuple[int, int]] = {
    **{(kind, "weight"): (0, 1) for kind in ("conv1d", "conv2d", "conv3d", "linear")},
    **{(f"conv_transpose{n}d", "weight"): (1, 0) for n in (1, 2, 3)},
    ("embedding", "weight"): (0, 1),
    ("addmm", "weight"): (1, 0),
    ("matmul", "input1"): (-1, -2),
    ("_grouped_mm", "input1"): (-1, -2),
    ("grouped_mm", "input1"): (-1, -2),
    ("matmul", "input0"): (-2, -1),
}

_kinds: dict[Any, str | None] = {}


def kind_of(func: Callable[..., Any]) -> str | None:
    """The operator kind of a torch function; None for attribute reads and other calls without computation.

    >>> kind_of(torch.Tensor.__iadd__), kind_of(torch.add), kind_of(torch.Tensor.shape.__get__)
    ('add', 'add', None)
    """
    try:
        return _kinds[func]
    except KeyError:
        _kinds[func] = kind = _kind_of(func)
        return kind


def _kind_of(func: Callable[..., Any]) -> str | None:
    name = getattr(func, "__name__", type(func).__name__)
    if name in ("__get__", "__set__", "__delete__"):
        attribute = str(getattr(func, "__self__", None).__name__)  # type: ignore[union-attr]
        return f"attribute_{attribute}" if name == "__get__" and attribute in _VIEW_ATTRIBUTES else None
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
        if name[:1] in ("i", "r") and name[1:] in _BINARY:
            name = name[1:]
        return _ALIASES.get(name, name)
    if name in _IGNORED:
        return None
    name = name.removesuffix("_") if not name.endswith("__") else name
    return _ALIASES.get(name, name)


def in_transform() -> bool:
    """Whether a torch.func transform (vmap, grad, jvp) is active. Its tensors have no readable values."""
    return not torch.compiler.is_dynamo_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def is_inplace(func: Callable[..., Any]) -> bool:
    """Whether the function writes to its first argument (not considering an `inplace=True` argument)."""
    name = getattr(func, "__name__", "")
    if name.startswith("__") and name.endswith("__"):
        return name == "__setitem__" or (name[2:3] == "i" and name[3:-2] in _BINARY)
    return bool(name.endswith("_"))


def reads_values(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the control flow may depend on the result: the call exposes a tensor's values, not only its shape.

    >>> reads_values(torch.Tensor.__bool__, (torch.ones(()),), {}), reads_values(torch.add, (torch.ones(()), 1), {})
    (True, False)
    """
    name = getattr(func, "__name__", "")
    if name == "where":
        return len(args) + len(kwargs) == 1
    if name in ("__getitem__", "__setitem__"):
        keys = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(key, Tensor) and key.dtype in (torch.bool, torch.uint8) for key in keys)
    if name == "repeat_interleave":
        return any(isinstance(value, Tensor) for value in (*args[1:], *kwargs.values()))
    return name in _READERS


_NOT_CALLED: tuple[type, ...] = (staticmethod, classmethod, MethodWrapperType)


def _torch_functions() -> dict[Any, tuple[str, bool]]:
    """torch function → (kind, whether it writes to its first argument). A constant that torch.compile can read."""
    table: dict[Any, tuple[str, bool]] = {}
    for space in (torch, torch.Tensor, F, torch._C._VariableFunctions, torch._C._nn):
        for name in dir(space):
            static = space is torch.Tensor
            function: Any = inspect.getattr_static(space, name) if static else getattr(space, name, None)
            if inspect.isroutine(function) and not isinstance(function, _NOT_CALLED):
                kind = kind_of(function)
                if kind is not None:
                    table[function] = (kind, is_inplace(function))
    return table


KINDS = _torch_functions()
_HOOKABLE = frozenset(kind for kind, _ in KINDS.values())
# Custom operators that compute what a torch function computes, without namespace. transformers calls its own product
# under torch.export.
_CUSTOM = {"grouped_mm_fallback": "_grouped_mm"}


def hookable_kind(func: Any) -> tuple[str, bool] | None:
    """The kind of a function that can have quantizers, and whether it writes to its first argument."""
    found = KINDS.get(func)
    if found is None and not torch.compiler.is_dynamo_compiling():
        kind = _CUSTOM.get(getattr(func, "_qualified_op_name", "").rpartition("::")[2])
        found = None if kind is None else (kind, False)
    return found


def can_hook(kind: str) -> bool:
    """Whether operators of this kind can have quantizers (attribute reads and custom operators can't)."""
    return kind in _HOOKABLE


def channel_axis(kind: str, port: str) -> int:
    """The axis of per-channel scales (activations: axis 1)."""
    return 0 if port == "bias" else _CHANNELS.get((kind, port), (1, -1))[0]


def reduction_axis(kind: str, port: str) -> int:
    """The axis that grouped formats divide into blocks (activations: the last)."""
    return _CHANNELS.get((kind, port), (1, -1))[1]


Place = tuple[str, Any, Any]  # ("args", index, None) or ("args", index, sub-index) or ("kwargs", name, sub)


def _spread(head: str, key: Any, value: Any) -> Iterator[tuple[Place, Tensor]]:
    if isinstance(value, Tensor):
        yield (head, key, None), value
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            if isinstance(item, Tensor):
                yield (head, key, index), item


def locate(kind: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Place, Tensor]]:
    """Every tensor argument of a call with its port and its location in the arguments."""
    named = PORTS.get(kind)
    if named is not None:
        if func is torch.embedding:  # the only function with reversed arguments
            named = {0: "weight", 1: "input"}
        keywords = _KEYWORDS.get(kind, {})
        found: list[tuple[str, Place, Tensor]] = []
        for index, value in enumerate(args):
            if isinstance(value, Tensor):
                found.append((named.get(index, f"input{index}"), ("args", index, None), value))
        for name, value in kwargs.items():
            if isinstance(value, Tensor) and name != "out":
                found.append((keywords.get(name, name), ("kwargs", name, None), value))
        return found
    places: list[tuple[Place, Tensor]] = []
    for index, value in enumerate(args):
        places.extend(_spread("args", index, value))
    for name, value in kwargs.items():
        if name != "out":  # written, not read
            places.extend(_spread("kwargs", name, value))
    if len(places) == 1:
        return [("input", places[0][0], places[0][1])]
    return [(f"input{i}", place, tensor) for i, (place, tensor) in enumerate(places)]


def carries_floats(args: Iterable[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call has floating-point inputs.

    Other calls (masks, positions, indices) are counted separately. So sites keep their names if torch.export or another
    input takes a different path through such code.
    """
    for value in (*args, *kwargs.values()):
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, Tensor) and (item.is_floating_point() or item.is_complex()):
                return True
    return False


def put(args: list[Any], kwargs: dict[str, Any], place: Place, value: Tensor) -> None:
    """Replace the tensor at `place` (the inverse of `locate`). Nested lists are copied."""
    head, key, sub = place
    target: Any = args if head == "args" else kwargs
    if sub is None:
        target[key] = value
    else:
        items = list(target[key])
        items[sub] = value
        target[key] = type(target[key])(items) if isinstance(target[key], (list, tuple)) else items


Shape = tuple[int, ...]

# Products of rows with one of several matrices of weights, those of experts.
EXPERT_PRODUCTS = ("grouped_mm", "_grouped_mm")
EXPERT_WEIGHTS = tuple((kind, "input1") for kind in EXPERT_PRODUCTS)

# Operators that select some of the stored matrices by an index, and operand → the axis along which a product sums.
SELECTING = ("getitem", "index_select")
SELECTED: dict[tuple[str, str], int] = {
    ("linear", "weight"): -1,
    ("addmm", "weight"): -2,
    ("matmul", "input0"): -1,
    ("matmul", "input1"): -2,
    ("_grouped_mm", "input1"): -2,
}

# Kinds of operators that multiply. Each of them must be quantized or listed.
PRODUCTS = frozenset(
    (
        *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution"),
        *("linear", "addmm", "matmul", "mv", "dot", "vdot", "inner", "baddbmm", "addbmm", "addmv", "einsum"),
        *("bilinear", "tensordot", "chain_matmul", "linalg_multi_dot", "conv_tbc", "cdist"),
        *("scaled_dot_product_attention", "lstm", "gru", "rnn", "lstm_cell", "gru_cell", "rnn_cell"),
        *("grouped_mm", "_grouped_mm", "scaled_grouped_mm", "_scaled_grouped_mm", "_scaled_mm", "scaled_mm"),
        *("_native_multi_head_attention", "_transformer_encoder_layer_fwd"),
        *("mm", "bmm", "_sparse_mm", "smm", "hspmm", "sspaddmm", "_convolution", "cudnn_convolution"),
    )
)


def is_product(kind: str) -> bool:
    """Whether operators of this kind multiply, including names such as `torch.ops.aten.mm.default`.

    >>> is_product("mm.default"), is_product("transformed_matmul"), is_product("add")
    (True, True, False)
    """
    return kind.removeprefix("transformed_").partition(".")[0] in PRODUCTS


def macs(kind: str, inputs: Mapping[str, Shape], output: Shape, equation: str = "") -> int:
    """Multiply-accumulates; 0 for operators that only move or scale numbers. `equation` is the equation of einsum.

    >>> macs("linear", {"input": (4, 8), "weight": (16, 8)}, (4, 16))
    512
    """
    if kind.startswith("conv_transpose"):
        weight = inputs.get("weight", ())  # (in, out / groups, *kernel): weight[0] is used for each input element
        return prod(inputs["input"]) * prod(weight[1:]) if weight else 0
    if kind.startswith("conv"):
        weight = inputs.get("weight", ())  # (out, in / groups, *kernel): weight[0] is used for each output element
        return prod(output) * prod(weight[1:]) if weight else 0
    if kind in ("linear", "addmm"):
        return prod(output) * inputs["input"][-1]
    if kind in ("matmul", "mv", "dot", "inner"):
        return prod(output) * inputs["input0"][-1]
    if kind in ("baddbmm", "addmv"):
        return prod(output) * inputs["input1"][-1]
    if kind == "einsum":
        return prod(output) * _summed(equation, list(inputs.values()))
    if kind in ("grouped_mm", "_grouped_mm", "_scaled_grouped_mm", "scaled_grouped_mm", "_scaled_mm", "scaled_mm"):
        # (rows, k) · (experts, k, n): each row uses one expert; (k, rows) · … is a sum over ragged rows
        first = next(iter(inputs.values()), ())
        return prod(output) * first[-1] if len(output) <= 2 else prod(output[-2:]) * first[-1]
    if kind == "addbmm":  # (b, m, k) · (b, k, n), summed over b
        return prod(inputs["input1"]) * inputs["input2"][-1]
    if kind == "conv_tbc":  # (time, batch, in) · (kernel, in, out)
        return prod(output) * prod(inputs["input1"][:2])
    if kind == "cdist":
        return prod(output) * inputs["input0"][-1]
    if kind == "tensordot":  # (m·k)(k·n)(m·n) = (m·k·n)²
        return isqrt(prod(inputs["input0"]) * prod(inputs["input1"]) * prod(output))
    if kind in ("linalg_multi_dot", "chain_matmul"):
        matrices = list(inputs.values())
        rows = prod(matrices[0][:-1])
        return sum(rows * prod(shape) for shape in matrices[1:])
    if kind == "scaled_dot_product_attention":
        query, key, value = inputs["query"], inputs["key"], inputs["value"]
        heads = prod(query[:-2])
        return heads * query[-2] * key[-2] * (query[-1] + value[-1])
    if kind in ("lstm_cell", "gru_cell", "rnn_cell"):
        states = 2 if kind == "lstm_cell" else 1  # positioned between the input and the two weights
        weights = [inputs.get(f"input{states + i}", ()) for i in (1, 2)]
        return inputs["input0"][0] * sum(prod(weight) for weight in weights)
    if kind in ("lstm", "gru", "rnn"):
        first = inputs["input0"]
        steps = prod(first[:-1])
        return steps * sum(prod(shape) for shape in inputs.values() if len(shape) == 2 and shape is not first)
    if kind == "bilinear":
        weight = inputs.get("input2", ())
        return prod(output[:-1]) * prod(weight)
    return 0


def _summed(equation: str, shapes: list[Shape]) -> int:
    """The number of products that einsum sums per output element; 0 if it sums none."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    sizes: dict[str, int] = {}
    for term, shape in zip(left.split(","), shapes, strict=False):
        head, _, tail = term.partition("...")  # letters after the ellipsis count from the end
        for letter, size in [*zip(head, shape, strict=False), *zip(tail[::-1], shape[::-1], strict=False)]:
            sizes[letter] = max(size, sizes.get(letter, 1))
    summed = [letter for letter in sizes if (letter not in right if arrow else left.count(letter) > 1)]
    return prod(sizes[letter] for letter in summed) if summed and len(shapes) > 1 else 0
