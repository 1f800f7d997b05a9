"""Conversions of ONNX operators to those of LiteRT, in integers where the plan quantizes operands and result."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.deployment.onnx_files import operator_of
from bitwright.deployment.runtimes.litert_writer import (
    CodeGrid,
    FileTensor,
    GraphWriter,
    Target,
    Translation,
    Unsupported,
    WeightCodes,
)

_FLOAT_FIX = "plan for the backend tflitemicro, or keep this operator in float (keep_float)"


def attribute(node: ir.Node, name: str, default: Any) -> Any:
    """The value of an attribute."""
    found = node.attributes.get(name)
    return default if found is None else found.value


# Convolutions and products


def _product_target(
    writer: GraphWriter, value: ir.Value, x: ir.Value | None, weight: WeightCodes | None
) -> Target | None:
    """The grid of an integer product's result; None if the plan leaves the product in float."""
    if writer.codes(x) is None or weight is None:
        return None
    if weight.codes.dtype.kind != "i" or weight.codes.min(initial=0) < -128 or weight.codes.max(initial=0) > 127:
        raise Unsupported(f"the weight {weight.site} doesn't have signed codes of 8 bits", "use int8/channel/sym")
    if weight.zero_point.any():
        raise Unsupported(f"the weight {weight.site} has a zero point", "use int8/channel/sym or int8/tensor/sym")
    target = writer.target(value)
    if target is None:
        raise Unsupported("its operands are integers, but its result has no grid, so it would run in float", _FLOAT_FIX)
    return target


def _int8(codes: NDArray[Any]) -> NDArray[np.int8]:
    return codes.astype(np.int8)


def _bias(writer: GraphWriter, value: ir.Value | None, outputs: int, *, integer: bool) -> FileTensor:
    """The bias, int32 or float. Zeros if the operator has no bias."""
    if value is None:
        kind = np.int32 if integer else np.float32
        return writer.constant("no_bias", np.zeros(outputs, kind))
    found = writer.weight(value)
    if integer:
        if found is None or found.codes.dtype != np.int32:
            raise Unsupported("an integer product needs an int32 bias", "use the backend tflitemicro, or bias: int32")
        return writer.keep(found, found.codes.reshape(-1))
    numbers = writer.array(value)
    if numbers is None:
        raise Unsupported("its bias is computed")
    return writer.constant(str(value.name), np.broadcast_to(numbers.reshape(-1), (outputs,)).copy())


def _same(size: int, kernel: int, stride: int, dilation: int) -> tuple[int, int]:
    """The padding that TFLite calls SAME."""
    out = -(-size // stride)
    total = max((out - 1) * stride + dilation * (kernel - 1) + 1 - size, 0)
    return total // 2, total - total // 2


def _padding(
    writer: GraphWriter, x: FileTensor, pads: Sequence[tuple[int, int]], same: bool, *, fill: float = 0.0
) -> tuple[FileTensor, int]:
    """The input, padded by a PAD operator if necessary, and the number of TFLite's padding: SAME or VALID."""
    if same and any(sum(pair) for pair in pads):
        return x, writer.file.enumerated("Padding", "SAME")
    if any(sum(pair) for pair in pads):
        x = _padded(writer, x, {axis + 2: pair for axis, pair in enumerate(pads)}, fill=fill)
    return x, writer.file.enumerated("Padding", "VALID")


def _padded(writer: GraphWriter, x: FileTensor, pads: dict[int, tuple[int, int]], *, fill: float = 0.0) -> FileTensor:
    """PAD by axis of the graph, with zeros or with the lowest value (minus infinity)."""
    shape = tuple(size + sum(pads.get(axis, (0, 0))) for axis, size in enumerate(x.shape))
    widths = np.zeros((x.rank, 2), np.int32)
    for axis, pair in pads.items():
        widths[x.axis(axis)] = pair
    extra = [writer.file.tensor("widths", widths.shape, np.int32, data=widths)]
    if fill == 0:
        return writer.emit("PAD", [x], shape, last=x.last, like=x, extra=extra, options="PadOptions")
    if x.grid is None:
        value = np.array([max(fill, np.finfo(np.float32).min)], np.float32)
        extra.append(writer.file.tensor("fill", (1,), np.float32, data=value))
    else:
        scale, zero = np.array([x.grid.scale], np.float32), np.array([x.grid.zero_point])
        code = np.array([x.grid.code(fill)], np.int8)
        extra.append(writer.file.tensor("fill", (1,), np.int8, scale=scale, zero_point=zero, data=code))
    return writer.emit("PADV2", [x], shape, last=x.last, like=x, extra=extra, options="PadV2Options")


def _wide(writer: GraphWriter, x: FileTensor, rank: int) -> FileTensor:
    """Channels last; with a height of one for a convolution or pooling along one axis."""
    x = writer.layout(x, last=True)
    if rank == 2:
        return x
    if rank != 1:
        raise Unsupported(f"LiteRT's kernels have no {rank} spatial axes")
    n, c, length = x.shape
    made = writer.reshaped(x, (n, 1, length, c))
    return FileTensor(index=made.index, shape=(n, c, 1, length), last=True, grid=x.grid, dtype=x.dtype)


def _narrow(writer: GraphWriter, x: FileTensor, rank: int) -> FileTensor:
    """Undo `_wide`."""
    if rank == 2:
        return x
    n, c, _, length = x.shape
    made = writer.reshaped(x, (n, length, c))
    return FileTensor(index=made.index, shape=(n, c, length), last=True, grid=x.grid, dtype=x.dtype)


def _spatial(node: ir.Node, rank: int, kernel: Sequence[int]) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    """Strides, dilations and pads of two axes; of one axis, with a height of one."""
    if attribute(node, "auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise Unsupported("it has auto_pad")
    strides = list(attribute(node, "strides", [1] * rank))
    dilations = list(attribute(node, "dilations", [1] * rank))
    pads = list(attribute(node, "pads", [0] * 2 * rank))
    pairs = list(zip(pads[:rank], pads[rank:], strict=True))
    if min(pads, default=0) < 0:
        raise Unsupported("it has negative pads")
    front = 2 - rank
    return [1] * front + strides, [1] * front + dilations, [(0, 0)] * front + pairs


def _activation(writer: GraphWriter, target: Target | None) -> int:
    name = "NONE" if target is None or target.activation is None else target.activation
    return writer.file.enumerated("ActivationFunctionType", name)


def _finish(writer: GraphWriter, node: ir.Node, target: Target | None, made: FileTensor, value: ir.Value) -> None:
    if target is None:
        writer.put(value, made)
    else:
        writer.put_target(target, made, clamp=target.activation is None)


def _conv(writer: GraphWriter, node: ir.Node) -> None:
    value, weight = node.outputs[0], writer.weight(node.inputs[1])
    numbers = writer.array(node.inputs[1])
    if numbers is None:
        raise Unsupported("its weight is computed")
    rank = numbers.ndim - 2
    target = _product_target(writer, value, node.inputs[0], weight)
    writer.products[operator_of(node)] = target is not None
    source = writer.real(node.inputs[0]) if target is None else writer.codes(node.inputs[0])
    assert source is not None
    x = _wide(writer, source, rank)
    kernel = numbers.shape[2:] if rank == 2 else (1, *numbers.shape[2:])
    strides, dilations, pads = _spatial(node, rank, kernel)
    group, outputs, channels = attribute(node, "group", 1), numbers.shape[0], x.shape[1]
    depthwise = group == channels and group > 1
    padded = [size + sum(pair) for size, pair in zip(x.shape[2:], pads, strict=True)]
    out = [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zip(padded, kernel, strides, dilations, strict=True)]
    same = all(
        pair == _same(n, k, s, d)
        for pair, n, k, s, d in zip(pads, x.shape[2:], kernel, strides, dilations, strict=True)
    )
    x, padding = _padding(writer, x, pads, same)

    def turned(array: NDArray[Any]) -> NDArray[Any]:
        array = array.reshape(*array.shape[:2], *kernel)
        return array.transpose(1, 2, 3, 0) if depthwise else array.transpose(0, 2, 3, 1)

    if target is not None:
        assert weight is not None
        if weight.axis not in (None, 0):
            raise Unsupported(f"the weight {weight.site} has scales along its inputs", "use int8/channel/sym")
        kept = writer.keep(weight, turned(_int8(weight.codes)), axis=3 if depthwise else 0)
    else:
        kept = writer.constant(str(node.inputs[1].name), turned(numbers))  # type: ignore[union-attr]
    bias = _bias(writer, node.inputs[2] if len(node.inputs) > 2 else None, outputs, integer=target is not None)
    values: dict[str, Any] = {
        "padding": padding,
        "strideH": strides[0],
        "strideW": strides[1],
        "dilationHFactor": dilations[0],
        "dilationWFactor": dilations[1],
        "fusedActivationFunction": _activation(writer, target),
    }
    kind, options = ("DEPTHWISE_CONV_2D", "DepthwiseConv2DOptions") if depthwise else ("CONV_2D", "Conv2DOptions")
    if depthwise:
        values["depthMultiplier"] = outputs // channels
    grid = None if target is None else target.grid
    name = str(value.name) if target is None else target.grid.owner
    shape = (x.shape[0], outputs, *out)
    made = writer.emit(kind, [x, kept, bias], shape, last=True, grid=grid, options=options, values=values, name=name)
    _finish(writer, node, target, _narrow(writer, made, rank), value)


def _conv_transpose(writer: GraphWriter, node: ir.Node) -> None:
    value, weight = node.outputs[0], writer.weight(node.inputs[1])
    numbers = writer.array(node.inputs[1])
    if numbers is None or numbers.ndim != 4 or attribute(node, "group", 1) != 1:
        raise Unsupported("LiteRT's transposed convolutions have two spatial axes and no groups")
    target = _product_target(writer, value, node.inputs[0], weight)
    writer.products[operator_of(node)] = target is not None
    source = writer.real(node.inputs[0]) if target is None else writer.codes(node.inputs[0])
    assert source is not None
    x = writer.layout(source, last=True)
    kernel = numbers.shape[2:]
    strides, dilations, pads = _spatial(node, 2, kernel)
    if any(step != 1 for step in dilations):
        raise Unsupported("LiteRT's transposed convolutions have no dilation")
    more = attribute(node, "output_padding", [0, 0])
    outputs = numbers.shape[1]
    full = [(n - 1) * s + k for n, s, k in zip(x.shape[2:], strides, kernel, strict=True)]
    ends = [size - sum(pair) + extra for size, pair, extra in zip(full, pads, more, strict=True)]
    whole = [max(size, begin + end) for size, (begin, _), end in zip(full, pads, ends, strict=True)]
    if target is not None:
        assert weight is not None
        if weight.axis not in (None, 1):
            raise Unsupported(f"the weight {weight.site} has scales along its inputs", "use int8/channel/sym")
        kept = writer.keep(weight, _int8(weight.codes).transpose(1, 2, 3, 0), axis=0)
    else:
        kept = writer.constant(str(node.inputs[1].name), numbers.transpose(1, 2, 3, 0))  # type: ignore[union-attr]
    bias = _bias(writer, node.inputs[2] if len(node.inputs) > 2 else None, outputs, integer=target is not None)
    shape = (x.shape[0], outputs, *whole)
    made = writer.emit(
        "TRANSPOSE_CONV",
        [kept, x, bias],
        shape,
        last=True,
        grid=None if target is None else target.grid,
        before=[writer.numbers([shape[0], *whole, outputs])],
        options="TransposeConvOptions",
        values={
            "padding": writer.file.enumerated("Padding", "VALID"),
            "strideH": strides[0],
            "strideW": strides[1],
            "fusedActivationFunction": 0,
        },
        name=str(value.name) if target is None else target.grid.owner,
    )
    cuts = {axis + 2: (begin, begin + end, 1) for axis, ((begin, _), end) in enumerate(zip(pads, ends, strict=True))}
    made = _cut(writer, made, cuts)
    if target is None:
        writer.put(value, made)
    else:
        writer.put_target(target, made, clamp=True)


def _gemm(writer: GraphWriter, node: ir.Node) -> None:
    if attribute(node, "alpha", 1.0) != 1 or attribute(node, "beta", 1.0) != 1 or attribute(node, "transA", 0):
        raise Unsupported("it has alpha, beta or transA")
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    _linear(writer, node, node.outputs[0], bias, turned=bool(attribute(node, "transB", 0)))


def _matmul(writer: GraphWriter, node: ir.Node) -> None:
    weight = writer.array(node.inputs[1])
    if weight is not None and weight.ndim == 2 and writer.array(node.inputs[0]) is None:
        value, bias = node.outputs[0], None
        users = [use.node for use in value.uses()]
        if len(users) == 1 and users[0].op_type == "Add" and not value.is_graph_output():
            add = users[0]
            other = next((one for one in add.inputs if one is not value), None)
            found = writer.weight(other)
            if found is not None and found.codes.dtype == np.int32:
                bias, value = other, add.outputs[0]
                writer.skipped.add(add)
        _linear(writer, node, value, bias, turned=False)
        return
    _batch_matmul(writer, node)


def _linear(writer: GraphWriter, node: ir.Node, value: ir.Value, bias: ir.Value | None, *, turned: bool) -> None:
    weight, numbers = writer.weight(node.inputs[1]), writer.array(node.inputs[1])
    if numbers is None or numbers.ndim != 2:
        raise Unsupported("its weight is computed")
    target = _product_target(writer, value, node.inputs[0], weight)
    writer.products[operator_of(node)] = target is not None
    x = writer.real(node.inputs[0]) if target is None else writer.codes(node.inputs[0])
    assert x is not None
    x = writer.layout(x, last=False)
    outputs = numbers.shape[0 if turned else 1]
    if target is not None:
        assert weight is not None
        if weight.axis not in (None, 0 if turned else 1):
            raise Unsupported(f"the weight {weight.site} has scales along its inputs", "use int8/channel/sym")
        codes = _int8(weight.codes)
        kept = writer.keep(weight, codes if turned else codes.T, axis=0)
    else:
        kept = writer.constant(str(node.inputs[1].name), numbers if turned else numbers.T)  # type: ignore[union-attr]
    biased = _bias(writer, bias, outputs, integer=target is not None)
    made = writer.emit(
        "FULLY_CONNECTED",
        [x, kept, biased],
        (*x.shape[:-1], outputs),
        grid=None if target is None else target.grid,
        options="FullyConnectedOptions",
        values={"fusedActivationFunction": _activation(writer, target), "keepNumDims": True},
        name=str(value.name) if target is None else target.grid.owner,
    )
    _finish(writer, node, target, made, value)


def _batch_matmul(writer: GraphWriter, node: ir.Node) -> None:
    value = node.outputs[0]
    codes = [writer.codes(one) for one in node.inputs]
    target = writer.target(value) if all(one is not None for one in codes) else None
    if (
        target is None
        and all(one is not None and writer.array(one) is None for one in node.inputs)
        and None not in codes
    ):
        raise Unsupported("its operands are integers, but its result has no grid, so it would run in float", _FLOAT_FIX)
    writer.products[operator_of(node)] = target is not None
    tensors = [writer.real(one) for one in node.inputs] if target is None else [one for one in codes if one is not None]
    a, b = (writer.layout(one, last=False) for one in tensors)
    if a.rank < 2 or b.rank < 2:
        raise Unsupported("LiteRT multiplies matrices, not vectors")
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    made = writer.emit(
        "BATCH_MATMUL",
        [a, b],
        shape,
        grid=None if target is None else target.grid,
        options="BatchMatMulOptions",
        values={"adjX": False, "adjY": False},
        name=str(value.name) if target is None else target.grid.owner,
    )
    if target is None:
        writer.put(value, made)
    else:
        writer.put_target(target, made, clamp=True)


# Elementwise operators


def _aligned(writer: GraphWriter, tensors: Sequence[FileTensor], constants: Sequence[bool]) -> list[FileTensor]:
    """The operands with one layout and, if it is channels last, with one rank."""
    rank = max(tensor.rank for tensor in tensors)
    last = any(tensor.last for tensor, constant in zip(tensors, constants, strict=True) if not constant)
    if not last or rank < 3:
        return [writer.layout(tensor, last=False) for tensor in tensors]
    ranked = []
    for tensor in tensors:
        if tensor.rank < rank and math.prod(tensor.shape) > 1:
            plain = writer.layout(tensor, last=False)
            tensor = writer.reshaped(plain, (*[1] * (rank - plain.rank), *plain.shape))
        ranked.append(tensor if tensor.rank < rank else writer.layout(tensor, last=True))
    return ranked


def _binary(kind: str, options: str | None, *, fused: bool = False, integer: bool = False) -> Translation:
    """An operator of two broadcast operands; `integer` if it has an int8 kernel with a scale per operand."""

    def write(writer: GraphWriter, node: ir.Node) -> None:
        value = node.outputs[0]
        codes = [writer.codes(one) for one in node.inputs] if integer else []
        target = writer.target(value) if codes and None not in codes else None
        tensors = [writer.real(one) for one in node.inputs] if target is None else [one for one in codes if one]
        constants = [writer.array(one) is not None for one in node.inputs]
        shape = np.broadcast_shapes(*(tensor.shape for tensor in tensors))
        tensors = _aligned(writer, tensors, constants)
        values = {"fusedActivationFunction": _activation(writer, target)} if fused else {}
        made = writer.emit(
            kind,
            tensors,
            shape,
            last=any(tensor.last for tensor in tensors),
            grid=None if target is None else target.grid,
            like=tensors[0] if target is None and kind != "SELECT_V2" else None,
            options=options,
            values=values,
            name=str(value.name) if target is None else target.grid.owner,
        )
        _finish(writer, node, target, made, value)

    return write


def _compare(kind: str, options: str) -> Translation:
    def write(writer: GraphWriter, node: ir.Node) -> None:
        tensors = [writer.real(one) for one in node.inputs]
        shape = np.broadcast_shapes(*(tensor.shape for tensor in tensors))
        tensors = _aligned(writer, tensors, [writer.array(one) is not None for one in node.inputs])
        last = any(tensor.last for tensor in tensors)
        writer.put(node.outputs[0], writer.emit(kind, tensors, shape, last=last, dtype=np.bool_, options=options))

    return write


def _where(writer: GraphWriter, node: ir.Node) -> None:
    tensors = [writer.layout(writer.real(one), last=False) for one in node.inputs]
    shape = np.broadcast_shapes(*(tensor.shape for tensor in tensors))
    made = writer.emit("SELECT_V2", tensors, shape, like=tensors[1], options="SelectV2Options")
    writer.put(node.outputs[0], made)


def _unary(kind: str, options: str | None = None, *, integer: bool = False, **values: Any) -> Translation:
    """An operator of one operand; `integer` if it has an int8 kernel for any scales."""

    def write(writer: GraphWriter, node: ir.Node) -> None:
        value, codes = node.outputs[0], writer.codes(node.inputs[0]) if integer else None
        target = writer.target(value) if codes is not None else None
        x = writer.real(node.inputs[0]) if target is None or codes is None else codes
        grid = None if target is None else target.grid
        made = writer.emit(kind, [x], x.shape, last=x.last, grid=grid, options=options, values=values)
        if target is None:
            writer.put(value, made)
        else:
            writer.put_target(target, made, clamp=True)

    return write


def _clip(writer: GraphWriter, node: ir.Node) -> None:
    """Relu or Clip that isn't part of another operator."""
    value, codes = node.outputs[0], writer.codes(node.inputs[0])
    relu = node.op_type == "Relu"
    if not relu and any(one is not None and writer.array(one) is None for one in node.inputs[1:3]):
        raise Unsupported("its bounds are computed")
    low, high = (0.0, None) if relu else ([*(writer.bound(one) for one in node.inputs[1:3]), None, None])[:2]
    bounds = (-math.inf if low is None else low, math.inf if high is None else high)
    target = writer.target(value) if codes is not None else None
    if target is not None and codes is not None:
        made = writer.clamped(writer.requantized(codes, target.grid), *bounds)
        writer.put_target(target, made, clamp=True)
        return
    x = writer.real(node.inputs[0])
    kinds = {(0.0, math.inf): "RELU", (0.0, 6.0): "RELU6", (-1.0, 1.0): "RELU_N1_TO_1"}
    if bounds in kinds:
        writer.put(value, writer.emit(kinds[bounds], [x], x.shape, last=x.last))
        return
    for kind, bound in (("MAXIMUM", bounds[0]), ("MINIMUM", bounds[1])):
        if not math.isinf(bound):
            limit = writer.constant("bound", np.array([bound], np.float32))
            x = writer.emit(kind, [x, limit], x.shape, last=x.last, options="MaximumMinimumOptions")
    writer.put(value, x)


def _leaky_relu(writer: GraphWriter, node: ir.Node) -> None:
    alpha = float(attribute(node, "alpha", 0.01))
    _unary("LEAKY_RELU", "LeakyReluOptions", alpha=alpha)(writer, node)


def _gelu(writer: GraphWriter, node: ir.Node) -> None:
    approximate = attribute(node, "approximate", "none") == "tanh"
    _unary("GELU", "GeluOptions", approximate=approximate)(writer, node)


def _hard_sigmoid(writer: GraphWriter, node: ir.Node) -> None:
    """min(max(alpha·x + beta, 0), 1)."""
    x = writer.real(node.inputs[0])
    alpha, beta = float(attribute(node, "alpha", 0.2)), float(attribute(node, "beta", 0.5))
    x = _with_number(writer, "MUL", x, alpha)
    x = _with_number(writer, "ADD", x, beta)
    x = _with_number(writer, "MAXIMUM", x, 0.0)
    writer.put(node.outputs[0], _with_number(writer, "MINIMUM", x, 1.0))


def _reciprocal(writer: GraphWriter, node: ir.Node) -> None:
    x = writer.real(node.inputs[0])
    one = writer.constant("one", np.ones(1, np.float32))
    writer.put(node.outputs[0], writer.emit("DIV", [one, x], x.shape, last=x.last, options="DivOptions"))


_OPTIONS = {
    "ADD": "AddOptions",
    "SUB": "SubOptions",
    "MUL": "MulOptions",
    "MAXIMUM": "MaximumMinimumOptions",
    "MINIMUM": "MaximumMinimumOptions",
}


def _with_number(writer: GraphWriter, kind: str, x: FileTensor, number: float) -> FileTensor:
    constant = writer.constant("number", np.array([number], np.float32))
    return writer.emit(kind, [x, constant], x.shape, last=x.last, options=_OPTIONS[kind])


def _softmax(kind: str, options: str, **values: Any) -> Translation:
    def write(writer: GraphWriter, node: ir.Node) -> None:
        x = writer.real(node.inputs[0])
        axis = attribute(node, "axis", -1) % x.rank
        x = writer.layout(x, last=axis == 1 and x.rank > 2)
        if x.axis(axis) != x.rank - 1:
            raise Unsupported("LiteRT's softmax is along the last axis, or along the channels")
        made = writer.emit(kind, [x], x.shape, last=x.last, options=options, values=values)
        writer.put(node.outputs[0], made)

    return write


def _layer_norm(writer: GraphWriter, node: ir.Node) -> None:
    """Mean, variance, rsqrt, product and sum in float."""
    x = writer.layout(writer.real(node.inputs[0]), last=False)
    first = attribute(node, "axis", -1) % x.rank
    axes = list(range(first, x.rank))
    x = _normalized(writer, x, axes, float(attribute(node, "epsilon", 1e-5)))
    for kind, value in zip(("MUL", "ADD"), node.inputs[1:3], strict=False):
        if value is not None:
            x = writer.emit(kind, [x, writer.real(value)], x.shape, options=_OPTIONS[kind])
    writer.put(node.outputs[0], x)


def _normalized(writer: GraphWriter, x: FileTensor, axes: Sequence[int], epsilon: float) -> FileTensor:
    mean = _reduced(writer, "MEAN", x, axes, keep=True)
    kind, options = "SQUARED_DIFFERENCE", "SquaredDifferenceOptions"
    squares = writer.emit(kind, [x, mean], x.shape, last=x.last, options=options)
    variance = _reduced(writer, "MEAN", squares, axes, keep=True)
    scale = writer.emit("RSQRT", [_with_number(writer, "ADD", variance, epsilon)], variance.shape, last=x.last)
    centred = writer.emit("SUB", [x, mean], x.shape, last=x.last, options="SubOptions")
    return writer.emit("MUL", [centred, scale], x.shape, last=x.last, options="MulOptions")


def _batch_norm(writer: GraphWriter, node: ir.Node) -> None:
    """A norm that isn't folded: a product and a sum in float."""
    scale, bias, mean, variance = (writer.array(one) for one in node.inputs[1:5])
    if scale is None or bias is None or mean is None or variance is None:
        raise Unsupported("its statistics are computed")
    x = writer.layout(writer.real(node.inputs[0]), last=True)
    factor = scale / np.sqrt(variance + float(attribute(node, "epsilon", 1e-5)))
    shape = (1, -1) if x.rank < 3 else (-1,)
    for kind, numbers in (("MUL", factor), ("ADD", bias - mean * factor)):
        constant = writer.constant(kind.lower(), numbers.reshape(shape))
        x = writer.emit(kind, [x, constant], x.shape, last=x.last, options=_OPTIONS[kind])
    writer.put(node.outputs[0], x)


# Pooling and reductions


def _pool(kind: str) -> Translation:
    def write(writer: GraphWriter, node: ir.Node) -> None:
        value = node.outputs[0]
        source = writer.codes(node.inputs[0])
        target = writer.target(value) if source is not None else None
        if target is None or source is None:
            source = writer.real(node.inputs[0])
        kernel = list(attribute(node, "kernel_shape", []))
        rank = len(kernel)
        x = _wide(writer, source, rank)
        strides, dilations, pads = _spatial(node, rank, kernel)
        kernel = [1] * (2 - rank) + kernel
        if any(step != 1 for step in dilations):
            raise Unsupported("LiteRT's pooling has no dilation")
        sizes = list(zip(x.shape[2:], kernel, strides, pads, strict=True))
        out = [(n + sum(pair) - k) // s + 1 for n, k, s, pair in sizes]
        if attribute(node, "ceil_mode", 0):
            out = [-(-(n + sum(pair) - k) // s) + 1 for n, k, s, pair in sizes]
            out = [o - ((o - 1) * s >= n + pair[0]) for o, (n, _, s, pair) in zip(out, sizes, strict=True)]
        over = [max(0, (o - 1) * s + k - n - sum(pair)) for o, (n, k, s, pair) in zip(out, sizes, strict=True)]
        average = kind == "AVERAGE_POOL_2D"
        whole = [(begin, end + more) for (begin, end), more in zip(pads, over, strict=True)]
        same = all(pair == _same(n, k, s, 1) for pair, (n, k, s, _) in zip(whole, sizes, strict=True))
        inside = bool(attribute(node, "count_include_pad", 0)) and any(sum(pair) for pair in pads)
        if average and (any(over) if inside else any(sum(pair) for pair in whole) and not same):
            raise Unsupported("LiteRT's average pooling can't leave out this padding", "use count_include_pad=True")
        fill = 0.0 if average else -math.inf
        x, padding = _padding(writer, x, whole, same and not inside, fill=fill)
        made = writer.emit(
            kind,
            [x],
            (*x.shape[:2], *out),
            last=True,
            like=x,
            options="Pool2DOptions",
            values={
                "padding": padding,
                "strideH": strides[0],
                "strideW": strides[1],
                "filterHeight": kernel[0],
                "filterWidth": kernel[1],
                "fusedActivationFunction": 0,
            },
        )
        made = _narrow(writer, made, rank)
        if target is None:
            writer.put(value, made)
        else:
            writer.put_target(target, writer.requantized(made, target.grid), clamp=True)

    return write


def _reduced(
    writer: GraphWriter, kind: str, x: FileTensor, axes: Sequence[int], *, keep: bool, grid: CodeGrid | None = None
) -> FileTensor:
    """A reduction over axes of the graph."""
    along = sorted({axis % x.rank for axis in axes})
    shape = tuple(1 if axis in along else size for axis, size in enumerate(x.shape) if keep or axis not in along)
    if not keep and x.last and 1 not in along and len(shape) > 2:
        x = writer.layout(x, last=False)
    last = x.last and keep
    extra = [writer.numbers([x.axis(axis) for axis in along])]
    options, values = "ReducerOptions", {"keepDims": keep}
    return writer.emit(kind, [x], shape, last=last, grid=grid, extra=extra, options=options, values=values)


def _global_average(writer: GraphWriter, x: FileTensor) -> FileTensor:
    x = writer.layout(x, last=True)
    height, width = x.shape[2:]
    sizes = {"strideH": height, "strideW": width, "filterHeight": height, "filterWidth": width}
    values = {**sizes, "padding": writer.file.enumerated("Padding", "VALID"), "fusedActivationFunction": 0}
    shape, options = (*x.shape[:2], 1, 1), "Pool2DOptions"
    return writer.emit("AVERAGE_POOL_2D", [x], shape, last=True, like=x, options=options, values=values)


def _reduce(kind: str, *, integer: bool = False) -> Translation:
    def write(writer: GraphWriter, node: ir.Node) -> None:
        value, codes = node.outputs[0], writer.codes(node.inputs[0]) if integer else None
        target = writer.target(value) if codes is not None else None
        x = writer.real(node.inputs[0]) if target is None or codes is None else codes
        if node.op_type.startswith("Global"):
            axes, keep = list(range(2, x.rank)), True
        else:
            given = writer.ints(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] is not None else None
            axes, keep = given if given else list(range(x.rank)), bool(attribute(node, "keepdims", 1))
        same = target is not None and x.grid is not None and x.grid.same(target.grid)
        if same and kind == "MEAN" and x.rank == 4 and sorted(axis % 4 for axis in axes) == [2, 3]:
            made = _global_average(writer, x)  # MEAN rounds twice
            made = made if keep else writer.reshaped(made, made.shape[:2])
        else:
            made = _reduced(writer, kind, x, axes, keep=keep, grid=None if target is None else target.grid)
        if target is None:
            writer.put(value, made)
        else:
            writer.put_target(target, made, clamp=True)

    return write


def _arg_max(writer: GraphWriter, node: ir.Node) -> None:
    x = writer.layout(writer.real(node.inputs[0]), last=False)
    axis, keep = attribute(node, "axis", 0) % x.rank, bool(attribute(node, "keepdims", 1))
    left = tuple(size for i, size in enumerate(x.shape) if i != axis)
    values = {"outputType": writer.file.enumerated("TensorType", "INT64")}
    extra = [writer.file.tensor("axis", (), np.int32, data=np.array(axis, np.int32))]
    made = writer.emit("ARG_MAX", [x], left, dtype=np.int64, extra=extra, options="ArgMaxOptions", values=values)
    shape = tuple(1 if i == axis else size for i, size in enumerate(x.shape))
    writer.put(node.outputs[0], writer.reshaped(made, shape) if keep else made)


# Operators that move numbers: they keep the form and the grid of their operand


def _form(writer: GraphWriter, value: ir.Value | None) -> FileTensor:
    codes = writer.codes(value)
    return writer.real(value) if codes is None else codes


def _reshape(writer: GraphWriter, node: ir.Node) -> None:
    x = _form(writer, node.inputs[0])
    shape = _new_shape(writer, node, x.shape)
    if shape == x.shape:
        writer.put(node.outputs[0], x)
        return
    spatial = [size for size in x.shape[2:] if size != 1]
    if not x.last or (spatial and x.shape[1] != 1):  # otherwise the order of the numbers is the same
        x = writer.layout(x, last=False)
    writer.put(node.outputs[0], writer.reshaped(x, shape))


def _new_shape(writer: GraphWriter, node: ir.Node, shape: tuple[int, ...]) -> tuple[int, ...]:
    rank = len(shape)
    if node.op_type == "Flatten":
        axis = attribute(node, "axis", 1)
        axis = axis + rank if axis < 0 else axis
        return (math.prod(shape[:axis]), math.prod(shape[axis:]))
    given = writer.ints(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] is not None else None
    if node.op_type == "Squeeze":
        axes = (
            [axis % rank for axis in given] if given is not None else [i for i, size in enumerate(shape) if size == 1]
        )
        return tuple(size for axis, size in enumerate(shape) if axis not in axes)
    assert given is not None
    if node.op_type == "Unsqueeze":
        axes = [axis % (rank + len(given)) for axis in given]
        left = iter(shape)
        return tuple(1 if axis in axes else next(left) for axis in range(rank + len(given)))
    keep = not attribute(node, "allowzero", 0)
    sizes = [shape[axis] if size == 0 and keep else size for axis, size in enumerate(given)]
    if -1 in sizes:
        sizes[sizes.index(-1)] = math.prod(shape) // max(1, -math.prod(sizes))
    return tuple(sizes)


def _transpose(writer: GraphWriter, node: ir.Node) -> None:
    x = _form(writer, node.inputs[0])
    order = list(attribute(node, "perm", list(reversed(range(x.rank)))))
    shape = tuple(x.shape[axis] for axis in order)
    stored = [x.axis(axis) for axis in order]
    if stored == list(range(x.rank)):
        made = FileTensor(index=x.index, shape=shape, grid=x.grid, dtype=x.dtype)
    elif x.rank > 6:
        raise Unsupported("LiteRT transposes at most six axes")
    else:
        options = "TransposeOptions"
        made = writer.emit("TRANSPOSE", [x], shape, like=x, extra=[writer.numbers(stored)], options=options)
    writer.put(node.outputs[0], made)


def _identity(writer: GraphWriter, node: ir.Node) -> None:
    writer.put(node.outputs[0], _form(writer, node.inputs[0]))


def _cast(writer: GraphWriter, node: ir.Node) -> None:
    dtype = ir.DataType(attribute(node, "to", 1)).numpy()
    x = writer.real(node.inputs[0])
    if dtype in (np.float64, np.float16):
        dtype = np.dtype(np.float32)
    if np.dtype(dtype) == np.dtype(x.dtype):
        _identity(writer, node)
        return
    values = {
        "inDataType": writer.file.enumerated("TensorType", np.dtype(x.dtype).name.upper()),
        "outDataType": writer.file.enumerated("TensorType", np.dtype(dtype).name.upper()),
    }
    made = writer.emit("CAST", [x], x.shape, last=x.last, dtype=dtype, options="CastOptions", values=values)
    writer.put(node.outputs[0], made)


def _cut(writer: GraphWriter, x: FileTensor, cuts: dict[int, tuple[int, int, int]]) -> FileTensor:
    """A STRIDED_SLICE by axis of the graph: begin, end, step."""
    if all(cut == (0, x.shape[axis], 1) for axis, cut in cuts.items()):
        return x
    if x.rank > 5:
        raise Unsupported("LiteRT slices at most five axes")
    begins, ends, steps, shape = [0] * x.rank, list(x.stored_shape), [1] * x.rank, list(x.shape)
    for axis, (begin, end, step) in cuts.items():
        at = x.axis(axis)
        begins[at], ends[at], steps[at] = begin, end, step
        shape[axis] = len(range(begin, end, step))
    mask = sum(1 << at for at in range(x.rank) if steps[at] < 0 and ends[at] < 0)
    extra = [writer.numbers(one) for one in (begins, ends, steps)]
    return writer.emit(
        "STRIDED_SLICE",
        [x],
        shape,
        last=x.last,
        like=x,
        extra=extra,
        options="StridedSliceOptions",
        values={"endMask": mask},
    )


def _slice(writer: GraphWriter, node: ir.Node) -> None:
    x = _form(writer, node.inputs[0])
    starts, ends = writer.ints(node.inputs[1]), writer.ints(node.inputs[2])
    more = [writer.ints(value) if value is not None else None for value in node.inputs[3:5]]
    axes = more[0] if more and more[0] is not None else list(range(len(starts)))
    steps = more[1] if len(more) > 1 and more[1] is not None else [1] * len(starts)
    cuts = {}
    for axis, begin, end, step in zip(axes, starts, ends, steps, strict=True):
        found = range(*slice(begin, end, step).indices(x.shape[axis % x.rank]))
        cuts[axis % x.rank] = (found.start, found.stop, found.step)
    writer.put(node.outputs[0], _cut(writer, x, cuts))


def _split(writer: GraphWriter, node: ir.Node) -> None:
    x = _form(writer, node.inputs[0])
    axis = attribute(node, "axis", 0) % x.rank
    count = len(node.outputs)
    given = writer.ints(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] is not None else None
    size = -(-x.shape[axis] // count)
    sizes = given or [min(size, x.shape[axis] - size * i) for i in range(count)]
    begin = 0
    for value, length in zip(node.outputs, sizes, strict=True):
        writer.put(value, _cut(writer, x, {axis: (begin, begin + length, 1)}))
        begin += length


def _gather(writer: GraphWriter, node: ir.Node) -> None:
    indices = writer.array(node.inputs[1])
    x = _form(writer, node.inputs[0])
    axis = attribute(node, "axis", 0) % x.rank
    if indices is not None:
        indices = np.where(indices < 0, indices + x.shape[axis], indices).astype(np.int32)
        if indices.size == 1 and indices.ndim == 0:  # one slice, without its axis
            cut = _cut(writer, x, {axis: (int(indices), int(indices) + 1, 1)})
            shape = tuple(size for i, size in enumerate(x.shape) if i != axis)
            writer.put(node.outputs[0], writer.reshaped(writer.layout(cut, last=False), shape))
            return
        at = writer.constant("indices", indices)
    else:
        at = writer.layout(writer.real(node.inputs[1]), last=False)
    x = writer.layout(x, last=False)
    shape = (*x.shape[:axis], *at.shape, *x.shape[axis + 1 :])
    made = writer.emit(
        "GATHER",
        [x],
        shape,
        like=x,
        extra=[at.index],
        options="GatherOptions",
        values={"axis": axis, "batchDims": 0},
    )
    writer.put(node.outputs[0], made)


def _concat(writer: GraphWriter, node: ir.Node) -> None:
    value = node.outputs[0]
    codes = [writer.codes(one) for one in node.inputs]
    target = writer.target(value) if None not in codes else None
    if target is not None:
        tensors = [writer.requantized(one, target.grid) for one in codes if one is not None]
    else:
        tensors = [writer.real(one) for one in node.inputs]
    rank = tensors[0].rank
    last = any(tensor.last for tensor in tensors)
    tensors = [writer.layout(tensor, last=last) for tensor in tensors]
    axis = attribute(node, "axis", 0) % rank
    shape = tuple(
        sum(one.shape[axis] for one in tensors) if i == axis else size for i, size in enumerate(tensors[0].shape)
    )
    last = last and rank > 2
    made = writer.emit(
        "CONCATENATION",
        tensors,
        shape,
        last=last,
        like=tensors[0],
        options="ConcatenationOptions",
        values={"axis": tensors[0].axis(axis), "fusedActivationFunction": 0},
    )
    if target is None:
        writer.put(value, made)
    else:
        writer.put_target(target, made, clamp=True)


def _pad(writer: GraphWriter, node: ir.Node) -> None:
    x = _form(writer, node.inputs[0])
    pads, mode = writer.ints(node.inputs[1]), attribute(node, "mode", "constant")
    axes = writer.ints(node.inputs[3]) if len(node.inputs) > 3 and node.inputs[3] is not None else list(range(x.rank))
    around = {axis % x.rank: (pads[i], pads[i + len(axes)]) for i, axis in enumerate(axes)}
    filled = writer.array(node.inputs[2]) if len(node.inputs) > 2 else None
    if mode == "constant" and min(pads) >= 0:
        fill = 0.0 if filled is None else float(filled.reshape(()))
        if fill and x.grid is not None and not math.isinf(fill):
            x = writer.real(node.inputs[0])  # the fill may lie between codes, or outside of the grid
        writer.put(node.outputs[0], _padded(writer, x, around, fill=fill))
        return
    if mode != "reflect" or min(pads) < 0:
        raise Unsupported("LiteRT pads with a constant or by reflection")
    shape = tuple(size + sum(around.get(axis, (0, 0))) for axis, size in enumerate(x.shape))
    widths = np.zeros((x.rank, 2), np.int32)
    for axis, pair in around.items():
        widths[x.axis(axis)] = pair
    extra = [writer.file.tensor("widths", widths.shape, np.int32, data=widths)]
    options = "MirrorPadOptions"
    writer.put(
        node.outputs[0],
        writer.emit("MIRROR_PAD", [x], shape, last=x.last, like=x, extra=extra, options=options, values={"mode": 0}),
    )


def _expand(writer: GraphWriter, node: ir.Node) -> None:
    x = writer.layout(_form(writer, node.inputs[0]), last=False)
    shape = np.broadcast_shapes(x.shape, tuple(writer.ints(node.inputs[1])))
    if shape == x.shape:
        writer.put(node.outputs[0], x)
        return
    extra, options = [writer.numbers(shape)], "BroadcastToOptions"
    writer.put(node.outputs[0], writer.emit("BROADCAST_TO", [x], shape, like=x, extra=extra, options=options))


def _resize(writer: GraphWriter, node: ir.Node) -> None:
    """Two spatial axes, by nearest neighbour or linearly, with constant sizes."""
    x = writer.layout(_form(writer, node.inputs[0]), last=True)
    mode = attribute(node, "mode", "nearest")
    where = attribute(node, "coordinate_transformation_mode", "half_pixel")
    scales = writer.array(node.inputs[2]) if len(node.inputs) > 2 else None
    sizes = writer.array(node.inputs[3]) if len(node.inputs) > 3 else None
    if x.rank != 4 or attribute(node, "antialias", 0) or (scales is None and sizes is None):
        raise Unsupported("LiteRT resizes two spatial axes to a constant size, without antialiasing")
    out = [int(size) for size in sizes[-2:]] if sizes is not None else []
    if not out and scales is not None:
        out = [math.floor(size * scale) for size, scale in zip(x.shape[2:], scales[-2:], strict=True)]
    corners, centres = where == "align_corners", where in ("half_pixel", "pytorch_half_pixel")
    options, kind = "ResizeBilinearOptions", "RESIZE_BILINEAR"
    whole = all(new % size == 0 for new, size in zip(out, x.shape[2:], strict=True))
    if mode == "nearest":
        if where != "asymmetric" or not whole:
            raise Unsupported("LiteRT repeats pixels by whole factors")
        options, kind, corners, centres = "ResizeNearestNeighborOptions", "RESIZE_NEAREST_NEIGHBOR", False, False
    elif mode != "linear" or where not in ("align_corners", "half_pixel", "pytorch_half_pixel", "asymmetric"):
        raise Unsupported("LiteRT resizes by nearest neighbour or linearly")
    elif x.grid is not None:
        x = writer.layout(writer.real(node.inputs[0]), last=True)
    values = {"alignCorners": corners, "halfPixelCenters": centres}
    extra = [writer.numbers(out)]
    shape = (*x.shape[:2], *out)
    made = writer.emit(kind, [x], shape, last=True, like=x, extra=extra, options=options, values=values)
    writer.put(node.outputs[0], made)


OPERATORS: dict[str, Callable[[GraphWriter, ir.Node], None]] = {
    "Abs": _unary("ABS", "AbsOptions"),
    "Add": _binary("ADD", "AddOptions", fused=True, integer=True),
    "And": _compare("LOGICAL_AND", "LogicalAndOptions"),
    "ArgMax": _arg_max,
    "AveragePool": _pool("AVERAGE_POOL_2D"),
    "BatchNormalization": _batch_norm,
    "Cast": _cast,
    "Clip": _clip,
    "Concat": _concat,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Cos": _unary("COS", "CosOptions"),
    "Div": _binary("DIV", "DivOptions", fused=True),
    "Elu": _unary("ELU"),
    "Equal": _compare("EQUAL", "EqualOptions"),
    "Exp": _unary("EXP", "ExpOptions"),
    "Expand": _expand,
    "Flatten": _reshape,
    "Gather": _gather,
    "Gelu": _gelu,
    "Gemm": _gemm,
    "GlobalAveragePool": _reduce("MEAN", integer=True),
    "GlobalMaxPool": _reduce("REDUCE_MAX"),
    "Greater": _compare("GREATER", "GreaterOptions"),
    "GreaterOrEqual": _compare("GREATER_EQUAL", "GreaterEqualOptions"),
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _unary("HARD_SWISH", "HardSwishOptions"),
    "Identity": _identity,
    "LayerNormalization": _layer_norm,
    "LeakyRelu": _leaky_relu,
    "Less": _compare("LESS", "LessOptions"),
    "LessOrEqual": _compare("LESS_EQUAL", "LessEqualOptions"),
    "Log": _unary("LOG"),
    "LogSoftmax": _softmax("LOG_SOFTMAX", "LogSoftmaxOptions"),
    "MatMul": _matmul,
    "Max": _binary("MAXIMUM", "MaximumMinimumOptions"),
    "MaxPool": _pool("MAX_POOL_2D"),
    "Min": _binary("MINIMUM", "MaximumMinimumOptions"),
    "Mul": _binary("MUL", "MulOptions", fused=True, integer=True),
    "Neg": _unary("NEG", "NegOptions"),
    "Or": _compare("LOGICAL_OR", "LogicalOrOptions"),
    "Pad": _pad,
    "Pow": _binary("POW", "PowOptions"),
    "Reciprocal": _reciprocal,
    "ReduceMax": _reduce("REDUCE_MAX"),
    "ReduceMean": _reduce("MEAN", integer=True),
    "ReduceMin": _reduce("REDUCE_MIN"),
    "ReduceSum": _reduce("SUM"),
    "Relu": _clip,
    "Reshape": _reshape,
    "Resize": _resize,
    "Sigmoid": _unary("LOGISTIC"),
    "Sin": _unary("SIN"),
    "Slice": _slice,
    "Softmax": _softmax("SOFTMAX", "SoftmaxOptions", beta=1.0),
    "Split": _split,
    "Sqrt": _unary("SQRT"),
    "Squeeze": _reshape,
    "Sub": _binary("SUB", "SubOptions", fused=True, integer=True),
    "Tanh": _unary("TANH"),
    "Transpose": _transpose,
    "Unsqueeze": _reshape,
    "Where": _where,
}
"""The operators that are translated. Of these, softmax, functions and norms run in float."""
