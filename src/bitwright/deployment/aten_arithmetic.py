"""Operators of torch that compute, as ONNX: elementwise operators, products and reductions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import from_torch_dtype
from torch import Tensor, fx

from bitwright.deployment.graph_writer import NodeWriter, register

_BOOL = ir.DataType.BOOL
_UNARY = {
    "abs": "Abs",
    "ceil": "Ceil",
    "cos": "Cos",
    "erf": "Erf",
    "exp": "Exp",
    "floor": "Floor",
    "hardswish": "HardSwish",
    "log": "Log",
    "mish": "Mish",
    "neg": "Neg",
    "reciprocal": "Reciprocal",
    "relu": "Relu",
    "round": "Round",
    "sigmoid": "Sigmoid",
    "sign": "Sign",
    "sin": "Sin",
    "sqrt": "Sqrt",
    "tan": "Tan",
    "tanh": "Tanh",
}
_BINARY = {"mul": "Mul", "maximum": "Max", "minimum": "Min", "pow": "Pow"}
_COMPARISONS = {"eq": "Equal", "lt": "Less", "le": "LessOrEqual", "gt": "Greater", "ge": "GreaterOrEqual"}
_LOGICAL = {
    "logical_and": "And",
    "logical_or": "Or",
    "logical_xor": "Xor",
    "bitwise_and": "And",
    "bitwise_or": "Or",
    "bitwise_xor": "Xor",
    "__and__": "And",
    "__or__": "Or",
}
_REDUCTIONS = {"mean": "ReduceMean", "sum": "ReduceSum", "amax": "ReduceMax", "amin": "ReduceMin", "prod": "ReduceProd"}


# -- elementwise ------------------------------------------------------------------------------------------------


def _unary(op: str) -> Callable[..., Any]:
    def emit(w: NodeWriter, x: fx.Node, decimals: int = 0) -> Any:
        if decimals or w.dtype == torch.bool:
            w.refuse()
        return w(op, w.tensor(x, w.dtype))

    return emit


def _binary(op: str) -> Callable[..., Any]:
    def emit(w: NodeWriter, x: Any, other: Any = None, exponent: Any = None) -> Any:
        if w.dtype == torch.bool:
            w.refuse()
        second = exponent if other is None else other
        return w(op, w.tensor(x, w.dtype), w.tensor(second, w.dtype))

    return emit


def _compare(op: str) -> Callable[..., Any]:
    def emit(w: NodeWriter, x: Any, other: Any) -> Any:
        one, two = (w.meta(arg) if isinstance(arg, fx.Node) else arg for arg in (x, other))
        kind = torch.result_type(one, int(two) if isinstance(two, torch.SymInt) else two)
        if kind == torch.bool and op != "Equal":
            w.refuse()
        return w(op, w.tensor(x, kind), w.tensor(other, kind), dtype=_BOOL)

    return emit


def _logical(op: str) -> Callable[..., Any]:
    def emit(w: NodeWriter, x: Any, other: Any) -> Any:
        if any(isinstance(arg, fx.Node) and w.meta(arg).dtype != torch.bool for arg in (x, other)):
            w.refuse("numbers")
        return w(op, w.tensor(x, torch.bool), w.tensor(other, torch.bool), dtype=_BOOL)

    return emit


for _name, _op in _UNARY.items():
    register(_name)(_unary(_op))
for _name, _op in _BINARY.items():
    register(_name)(_binary(_op))
for _name, _op in _COMPARISONS.items():
    register(_name)(_compare(_op))
for _name, _op in _LOGICAL.items():
    register(_name)(_logical(_op))


@register("ne")
def _not_equal(w: NodeWriter, x: Any, other: Any) -> Any:
    return w("Not", _compare("Equal")(w, x, other))


@register("logical_not", "bitwise_not")
def _not(w: NodeWriter, x: fx.Node) -> Any:
    if w.meta(x).dtype != torch.bool:
        w.refuse("numbers")
    return w("Not", w.value(x))


@register("isnan")
def _isnan(w: NodeWriter, x: fx.Node) -> Any:
    return w("IsNaN", w.value(x), dtype=_BOOL)


def _scaled(w: NodeWriter, value: Any, alpha: Any) -> Any:
    return value if alpha == 1 else w("Mul", value, w.tensor(alpha, w.dtype))


@register("add", "sub")
def _add(w: NodeWriter, x: Any, other: Any, alpha: Any = 1) -> Any:
    if w.dtype == torch.bool:
        w.refuse()
    op = "Sub" if "sub" in str(w.node.target) else "Add"
    return w(op, w.tensor(x, w.dtype), _scaled(w, w.tensor(other, w.dtype), alpha))


@register("rsub")
def _rsub(w: NodeWriter, x: Any, other: Any, alpha: Any = 1) -> Any:
    return w("Sub", w.tensor(other, w.dtype), _scaled(w, w.tensor(x, w.dtype), alpha))


@register("div", "true_divide")
def _div(w: NodeWriter, x: Any, other: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode is not None and not (rounding_mode == "floor" and w.dtype.is_floating_point):
        w.refuse(f"rounding {rounding_mode}")
    result = w("Div", w.tensor(x, w.dtype), w.tensor(other, w.dtype))
    return w("Floor", result) if rounding_mode else result


@register("rsqrt")
def _rsqrt(w: NodeWriter, x: fx.Node) -> Any:
    return w("Reciprocal", w("Sqrt", w.tensor(x, w.dtype)))


@register("silu")
def _silu(w: NodeWriter, x: fx.Node) -> Any:
    return w("Mul", w.value(x), w("Sigmoid", w.value(x)))


@register("hardsigmoid")
def _hardsigmoid(w: NodeWriter, x: fx.Node) -> Any:
    return w("HardSigmoid", w.value(x), alpha=1 / 6, beta=0.5)


@register("gelu")
def _gelu(w: NodeWriter, x: fx.Node, approximate: str = "none") -> Any:
    return w("Gelu", w.value(x), approximate=approximate)


@register("elu")
def _elu(w: NodeWriter, x: fx.Node, alpha: float, scale: float, input_scale: float) -> Any:
    if scale != 1 or input_scale != 1:
        w.refuse()
    return w("Elu", w.value(x), alpha=float(alpha))


@register("leaky_relu")
def _leaky_relu(w: NodeWriter, x: fx.Node, negative_slope: float) -> Any:
    return w("LeakyRelu", w.value(x), alpha=float(negative_slope))


@register("hardtanh")
def _hardtanh(w: NodeWriter, x: fx.Node, min_val: float, max_val: float) -> Any:
    return _clamp(w, x, min_val, max_val)


@register("relu6")
def _relu6(w: NodeWriter, x: fx.Node) -> Any:
    return _clamp(w, x, 0, 6)


@register("clamp", "clip", "clamp_min", "clamp_max")
def _clamp(w: NodeWriter, x: fx.Node, min: Any = None, max: Any = None) -> Any:
    low, high = (None if end is None else w.tensor(end, w.dtype) for end in (min, max))
    if any(isinstance(end, fx.Node) and isinstance(w.meta(end), Tensor) and w.rank(end) for end in (min, max)):
        value = w.tensor(x, w.dtype)
        value = value if low is None else w("Max", value, low)
        return value if high is None else w("Min", value, high)
    return w("Clip", w.tensor(x, w.dtype), low, high)


@register("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")
def _where(w: NodeWriter, condition: fx.Node, x: Any, other: Any) -> Any:
    if w.meta(condition).dtype != torch.bool:
        w.refuse("a condition of numbers")
    return w(
        "Where", w.value(condition), w.tensor(x, w.dtype), w.tensor(other, w.dtype), dtype=from_torch_dtype(w.dtype)
    )


@register("masked_fill")
def _masked_fill(w: NodeWriter, x: fx.Node, mask: fx.Node, value: Any) -> Any:
    kind = from_torch_dtype(w.dtype)
    return w("Where", w.value(mask), w.tensor(value, w.dtype), w.tensor(x, w.dtype), dtype=kind)


@register("softmax.int", "log_softmax.int")
def _softmax(w: NodeWriter, x: fx.Node, dim: int, dtype: Any = None) -> Any:
    op = "LogSoftmax" if "log_softmax" in str(w.node.target) else "Softmax"
    return w(op, w.tensor(x, w.dtype), axis=dim)


# -- products ---------------------------------------------------------------------------------------------------


@register("matmul", "mm", "bmm")
def _matmul(w: NodeWriter, x: fx.Node, other: Any = None, mat2: Any = None) -> Any:
    return w("MatMul", w.tensor(x, w.dtype), w.tensor(mat2 if other is None else other, w.dtype))


@register("linear")
def _linear(w: NodeWriter, input: fx.Node, weight: fx.Node, bias: Any = None) -> Any:
    given, matrix = w.value(input), w.value(weight)
    if w.rank(weight) != 2:
        w.refuse("a vector as weight")
    if w.rank(input) == 2:
        return w("Gemm", given, matrix, None if bias is None else w.value(bias), transB=1)
    turned = w("Transpose", matrix, perm=[1, 0])
    turned.shape = ir.Shape([size if isinstance(size, int) else str(size) for size in w.shape(weight)[::-1]])
    product = w("MatMul", given, turned)
    if bias is None:
        return product
    product.shape = ir.Shape([None] * w.rank(input))
    return w("Add", product, w.value(bias))


@register("addmm")
def _addmm(w: NodeWriter, x: fx.Node, mat1: fx.Node, mat2: fx.Node, beta: Any, alpha: Any) -> Any:
    return w("Gemm", w.value(mat1), w.value(mat2), w.value(x), alpha=float(alpha), beta=float(beta))


@register("scaled_dot_product_attention")
def _attention(
    w: NodeWriter,
    query: fx.Node,
    key: fx.Node,
    value: fx.Node,
    attn_mask: Any,
    dropout_p: float,
    is_causal: bool,
    scale: Any,
    enable_gqa: bool,
) -> Any:
    rank, kind = w.rank(query), w.dtype
    if dropout_p or is_causal or enable_gqa or rank < 3:
        w.refuse("this form")
    width = w.shape(query)[-1]
    if scale is None and not isinstance(width, int):
        w.refuse("a dynamic head size")
    factor = 1 / math.sqrt(width) if scale is None else float(scale)
    turned = w("Transpose", w.value(key), perm=[*range(rank - 2), rank - 1, rank - 2])
    scores = w("MatMul", w("Mul", w.value(query), w.constant(np.array(factor), kind)), turned)
    if attn_mask is not None:
        mask = w.value(attn_mask)
        if w.meta(attn_mask).dtype == torch.bool:
            ends = [w.constant(np.array(end), kind) for end in (0.0, torch.finfo(kind).min)]
            mask = w("Where", mask, *ends, dtype=from_torch_dtype(kind))
        scores = w("Add", scores, mask)
    return w("MatMul", w("Softmax", scores, axis=-1), w.value(value))


# -- reductions -------------------------------------------------------------------------------------------------


def _reduce(op: str) -> Callable[..., Any]:
    def emit(w: NodeWriter, x: fx.Node, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
        axes = [dim] if isinstance(dim, int) else list(dim or ())
        if w.rank(x) == 0 or w.dtype == torch.bool:
            w.refuse()
        return w(op, w.tensor(x, w.dtype), *([w.ints(*axes)] if axes else []), keepdims=int(keepdim))

    return emit


for _name, _op in _REDUCTIONS.items():
    register(_name)(_reduce(_op))


@register("max", "min")
def _extreme(w: NodeWriter, x: fx.Node, dim: Any = None, keepdim: bool = False, other: Any = None) -> Any:
    op = "Max" if "max" in str(w.node.target) else "Min"
    if other is not None:
        return w(op, w.tensor(x, w.dtype), w.tensor(other, w.dtype))
    if dim is None:
        return w(f"Reduce{op}", w.value(x), keepdims=0)
    values = w(f"Reduce{op}", w.value(x), w.ints(dim), keepdims=int(keepdim))
    return values, w(f"Arg{op}", w.value(x), axis=dim, keepdims=int(keepdim), dtype=ir.DataType.INT64)


@register("argmax", "argmin")
def _arg_extreme(w: NodeWriter, x: fx.Node, dim: Any = None, keepdim: bool = False) -> Any:
    op = "ArgMax" if "argmax" in str(w.node.target) else "ArgMin"
    if dim is None:
        w.refuse("over all axes")
    return w(op, w.value(x), axis=dim, keepdims=int(keepdim), dtype=ir.DataType.INT64)


@register("cumsum")
def _cumsum(w: NodeWriter, x: fx.Node, dim: int, dtype: Any = None) -> Any:
    return w("CumSum", w.tensor(x, w.dtype), w.constant(np.array(dim, np.int64)))


@register("var.correction", "std.correction", "var.dim", "std.dim")
def _variance(
    w: NodeWriter, x: fx.Node, dim: Any = None, correction: Any = None, unbiased: bool = True, keepdim: bool = False
) -> Any:
    axes = [dim] if isinstance(dim, int) else list(dim or range(w.rank(x)))
    sizes = [w.shape(x)[axis] for axis in axes]
    if not all(isinstance(size, int) for size in sizes):
        w.refuse("dynamic sizes")
    less = int(unbiased) if correction is None else correction
    count = math.prod(sizes) - less
    centred = w("Sub", w.value(x), w("ReduceMean", w.value(x), w.ints(*axes), keepdims=1))
    total = w("ReduceSum", w("Mul", centred, centred), w.ints(*axes), keepdims=int(keepdim))
    result = w("Div", total, w.constant(np.array(count), w.dtype))
    return w("Sqrt", result) if "std" in str(w.node.target) else result


@register("linalg_vector_norm", "norm.ScalarOpt_dim")
def _vector_norm(
    w: NodeWriter,
    x: fx.Node,
    ord: Any = None,
    p: Any = None,
    dim: Any = None,
    keepdim: bool = False,
    dtype: Any = None,
) -> Any:
    order = ord if p is None else p
    if order not in (1, 2) or dim is None:
        w.refuse("this form")
    axes = [dim] if isinstance(dim, int) else list(dim)
    return w(f"ReduceL{int(order)}", w.tensor(x, w.dtype), w.ints(*axes), keepdims=int(keepdim))
