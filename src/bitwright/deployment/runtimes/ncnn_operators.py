"""Conversions of ONNX operators to ncnn layers; other operators are unsupported."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.deployment.onnx_files import operator_of
from bitwright.deployment.runtimes.ncnn_writer import (
    INT8,
    ConstantCodes,
    Layer,
    LayerParameter,
    LayerWeight,
    LayerWriter,
    Reading,
    UnsupportedOperator,
    array_of,
    axis_of,
    codes_of,
    factor,
    ints_of,
    rounded,
    shape_of,
)

_LEFT, _TOP, _RIGHT, _BOTTOM = 4, 14, 15, 16  # parameters of a convolution's padding


def attribute(node: ir.Node, name: str, default: Any) -> Any:
    """The value of an attribute."""
    found = node.attributes.get(name)
    return default if found is None else found.value


def conv(writer: LayerWriter, node: ir.Node) -> None:
    """Convert to Convolution, or to ConvolutionDepthWise for groups."""
    weight = array_of(node.inputs[1])
    if weight is None:
        raise UnsupportedOperator("a convolution with a computed weight")
    if weight.ndim != 4:
        raise UnsupportedOperator(f"a convolution with {weight.ndim - 2} spatial axes")
    if attribute(node, "auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise UnsupportedOperator("a convolution with auto_pad")
    group = attribute(node, "group", 1)
    outputs, _, height, width = weight.shape
    top, left, bottom, right = attribute(node, "pads", [0, 0, 0, 0])
    strides, dilations = attribute(node, "strides", [1, 1]), attribute(node, "dilations", [1, 1])
    parameters: dict[int, LayerParameter] = {
        0: outputs,
        1: width,
        11: height,
        2: dilations[1],
        12: dilations[0],
        3: strides[1],
        13: strides[0],
        _LEFT: left,
        _TOP: top,
        _RIGHT: right,
        _BOTTOM: bottom,
        6: weight.size,
    }
    if group > 1:
        parameters[7] = group
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    kind = "Convolution" if group == 1 else "ConvolutionDepthWise"
    _product(writer, node, kind, codes_of(node.inputs[1]), weight, bias, parameters, bias_at=5, groups=group)


def gemm(writer: LayerWriter, node: ir.Node) -> None:
    """Convert to InnerProduct."""
    if attribute(node, "alpha", 1.0) != 1 or attribute(node, "beta", 1.0) != 1 or attribute(node, "transA", 0):
        raise UnsupportedOperator("a Gemm with alpha, beta or transA")
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    _linear(writer, node, bias, turned=bool(attribute(node, "transB", 0)))


def matmul(writer: LayerWriter, node: ir.Node) -> None:
    """Convert to InnerProduct if the right operand is constant."""
    _linear(writer, node, None, turned=False)


def _linear(writer: LayerWriter, node: ir.Node, bias: ir.Value | None, *, turned: bool) -> None:
    weight, codes = array_of(node.inputs[1]), codes_of(node.inputs[1])
    if weight is None or weight.ndim != 2 or len(shape_of(node.inputs[0])) != 2:
        raise UnsupportedOperator(f"{node.op_type} that isn't a linear operator on one vector per sample")
    if not turned:  # ncnn stores one row per output
        weight = weight.T
        if codes is not None:
            codes = ConstantCodes(
                codes.site, codes.codes.T, codes.scale, None if codes.axis is None else 1 - codes.axis
            )
    parameters: dict[int, LayerParameter] = {0: weight.shape[0], 2: weight.size}
    _product(writer, node, "InnerProduct", codes, weight, bias, parameters, bias_at=1, groups=1)


def _product(
    writer: LayerWriter,
    node: ir.Node,
    kind: str,
    codes: ConstantCodes | None,
    weight: NDArray[Any],
    bias: ir.Value | None,
    parameters: dict[int, LayerParameter],
    *,
    bias_at: int,
    groups: int,
) -> None:
    read = rounded(node.inputs[0])
    integer = read is not None and codes is not None
    weights = [LayerWeight(weight.astype(np.float32), tagged=True)]
    if integer:
        assert codes is not None
        weights = [LayerWeight(_int8(codes), tagged=True, name=f"{codes.site}.codes")]
    if bias is not None:
        weights.append(_bias(bias))
        parameters[bias_at] = 1
    if not integer:
        writer.add(kind, node, [writer.blob(node.inputs[0])], parameters, weights, name=operator_of(node))
        return
    assert read is not None and codes is not None
    parameters[INT8] = 1 if groups > 1 else 2
    factors = _factors(codes, weight.shape[0], groups)
    weights += [
        LayerWeight(factors, name=f"{codes.site}.factor"),
        LayerWeight(factor(read.scale).reshape(1), name=f"{read.site}.factor"),
    ]
    name = codes.site.removesuffix(":weight")
    layer: Layer = writer.add(kind, node, [writer.blob(read.source)], parameters, weights, name=name)
    writer.net.sites.setdefault(read.site, Reading(layer, read.scale))
    writer.net.scales[codes.site] = codes.scale


def _int8(codes: ConstantCodes) -> NDArray[np.int8]:
    if codes.codes.min(initial=0) < -127 or codes.codes.max(initial=0) > 127:
        raise UnsupportedOperator(f"codes other than −127 to 127 around 0 at {codes.site}")
    return codes.codes.astype(np.int8)


def _factors(codes: ConstantCodes, outputs: int, groups: int) -> NDArray[np.float32]:
    """One factor per output, or per group."""
    if codes.axis not in (None, 0):
        raise UnsupportedOperator(f"scales along the inputs at {codes.site}")
    found = np.broadcast_to(factor(codes.scale).ravel(), (outputs,))
    if groups == 1:
        return found.copy()
    grouped = found.reshape(groups, -1)
    if not (grouped == grouped[:, :1]).all():
        raise UnsupportedOperator(
            f"more than one scale for a group of channels (use int8/tensor/sym/narrow) at {codes.site}"
        )
    return grouped[:, 0].copy()


def _bias(value: ir.Value) -> LayerWeight:
    numbers, codes = array_of(value), codes_of(value)
    if numbers is None:
        raise UnsupportedOperator("a computed bias")
    return LayerWeight(numbers.astype(np.float32).ravel(), name=None if codes is None else f"{codes.site}.value")


Write = Callable[["LayerWriter", ir.Node], None]
_MOST = float(np.finfo(np.float32).max)


def _plain(kind: str, **named: tuple[int, float]) -> Write:
    """A layer with one input; `named` maps its attributes to parameter ids and ONNX's defaults."""

    def write(writer: LayerWriter, node: ir.Node) -> None:
        parameters: dict[int, LayerParameter] = {
            number: float(attribute(node, name, default)) for name, (number, default) in named.items()
        }
        shape_of(node.outputs[0])
        writer.add(kind, node, [writer.blob(node.inputs[0])], parameters)

    return write


def _unary(operation: int) -> Write:
    def write(writer: LayerWriter, node: ir.Node) -> None:
        shape_of(node.outputs[0])
        writer.add("UnaryOp", node, [writer.blob(node.inputs[0])], {0: operation})

    return write


def _hard_swish(writer: LayerWriter, node: ir.Node) -> None:
    shape_of(node.outputs[0])
    writer.add("HardSwish", node, [writer.blob(node.inputs[0])], {0: 1 / 6, 1: 0.5})


def _clip(writer: LayerWriter, node: ir.Node) -> None:
    bounds = [array_of(value) for value in (*node.inputs[1:3], None, None)][:2]
    if any(value is not None and bound is None for value, bound in zip(node.inputs[1:3], bounds, strict=False)):
        raise UnsupportedOperator("a Clip with computed bounds")
    low, high = (
        default if bound is None else float(bound) for bound, default in zip(bounds, (-_MOST, _MOST), strict=True)
    )
    writer.add("Clip", node, [writer.blob(node.inputs[0])], {0: low, 1: high})


def _binary(operation: int, turned: int) -> Write:
    """Two blobs, or a blob and a number; `turned` is the operation with exchanged operands."""

    def write(writer: LayerWriter, node: ir.Node) -> None:
        rank = len(shape_of(node.outputs[0]))
        numbers = [array_of(value) for value in node.inputs]
        for this, other, kind in ((0, 1, turned), (1, 0, operation)):
            number = numbers[this]
            if number is not None and number.size == 1:
                blob = writer.blob(node.inputs[other])
                writer.add("BinaryOp", node, [blob], {0: kind, 1: 1, 2: float(number.item())})
                return
        reads = [_ranked(writer, value, rank) for value in node.inputs]
        writer.add("BinaryOp", node, reads, {0: operation})

    return write


def _ranked(writer: LayerWriter, value: ir.Value | None, rank: int) -> str:
    """A blob with as many axes as the result, because ncnn broadcasts other ranks differently from ONNX."""
    if array_of(value) is not None:
        return writer.blob(value, rank=rank)
    shape = shape_of(value)
    blob = writer.blob(value)
    if len(shape) == rank:
        return blob
    raise UnsupportedOperator(f"operands with {len(shape)} and {rank} axes")


def _sizes(shape: tuple[int, ...]) -> dict[int, LayerParameter]:
    """Width, height and channels of one sample."""
    return dict(zip((0, 1, 2), reversed(shape[1:]), strict=False))


def _reshape(writer: LayerWriter, node: ir.Node) -> None:
    """Convert all operators that only change the shape."""
    shape_of(node.inputs[0])
    writer.add("Reshape", node, [writer.blob(node.inputs[0])], _sizes(shape_of(node.outputs[0])))


def _identity(writer: LayerWriter, node: ir.Node) -> None:
    writer.alias(node.outputs[0], writer.blob(node.inputs[0]))


def _pool(kind: int) -> Write:
    def write(writer: LayerWriter, node: ir.Node) -> None:
        shape, out = shape_of(node.inputs[0]), shape_of(node.outputs[0])
        kernel = attribute(node, "kernel_shape", [])
        if len(shape) != 4 or any(step != 1 for step in attribute(node, "dilations", [1, 1])):
            raise UnsupportedOperator(f"{node.op_type} with dilations, or with an input that isn't an image")
        strides = attribute(node, "strides", [1, 1])
        top, left, bottom, right = attribute(node, "pads", [0, 0, 0, 0])
        # the last window may exceed the input (ceil_mode): add padding, which doesn't affect a maximum
        over = [
            max(0, (out[i + 2] - 1) * strides[i] + kernel[i] - shape[i + 2] - begin - end)
            for i, (begin, end) in enumerate(((top, bottom), (left, right)))
        ]
        if kind == 1 and any(over):
            raise UnsupportedOperator("AveragePool with windows that exceed the input (ceil_mode)")
        parameters: dict[int, LayerParameter] = {0: kind, 1: kernel[1], 11: kernel[0], 2: strides[1], 12: strides[0]}
        parameters |= {3: left, 13: top, 14: right + over[1], 15: bottom + over[0], 5: 1}
        if kind == 1:
            parameters[6] = int(attribute(node, "count_include_pad", 0))
        writer.add("Pooling", node, [writer.blob(node.inputs[0])], parameters)

    return write


def _global_pool(kind: int) -> Write:
    def write(writer: LayerWriter, node: ir.Node) -> None:
        if len(shape_of(node.inputs[0])) != 4:
            raise UnsupportedOperator(f"{node.op_type} with an input that isn't an image")
        _pool_all(writer, node, kind)

    return write


def _pool_all(writer: LayerWriter, node: ir.Node, kind: int) -> None:
    """ncnn's global pooling returns a vector; a Reshape restores the axes that ONNX keeps."""
    shape = shape_of(node.outputs[0])
    blob = writer.blob(node.inputs[0])
    if len(shape) == 2:
        writer.add("Pooling", node, [blob], {0: kind, 4: 1})
        return
    vector = writer.add("Pooling", f"{node.outputs[0].name}.vector", [blob], {0: kind, 4: 1})
    writer.add("Reshape", node, vector.writes, _sizes(shape))


def _reduce(operation: int, pooling: int) -> Write:
    """A reduction over an image becomes a pooling, which is faster."""

    def write(writer: LayerWriter, node: ir.Node) -> None:
        rank = len(shape_of(node.inputs[0]))
        axes = ints_of(node.inputs[1]) if len(node.inputs) > 1 else None
        if axes is None:
            raise UnsupportedOperator(f"{node.op_type} without constant axes")
        along = sorted(axis_of(axis, rank) for axis in axes)
        if rank == 4 and along == [1, 2]:
            _pool_all(writer, node, pooling)
            return
        shape_of(node.outputs[0])
        keep = int(attribute(node, "keepdims", 1))
        reads = [writer.blob(node.inputs[0])]
        writer.add("Reduction", node, reads, {0: operation, 1: 0, 3: tuple(along), 4: keep, 5: 1})

    return write


def _concat(writer: LayerWriter, node: ir.Node) -> None:
    rank = len(shape_of(node.outputs[0]))
    axis = axis_of(attribute(node, "axis", 0), rank)
    writer.add("Concat", node, [writer.blob(value, rank=rank) for value in node.inputs], {0: axis})


def _softmax(writer: LayerWriter, node: ir.Node) -> None:
    axis = axis_of(attribute(node, "axis", -1), len(shape_of(node.inputs[0])))
    writer.add("Softmax", node, [writer.blob(node.inputs[0])], {0: axis, 1: 1})


_PADDING = {"constant": 0, "edge": 1, "reflect": 2}


def _pad(writer: LayerWriter, node: ir.Node) -> None:
    rank = len(shape_of(node.inputs[0]))
    pads = ints_of(node.inputs[1])
    axes = ints_of(node.inputs[3]) if len(node.inputs) > 3 and node.inputs[3] is not None else list(range(rank))
    fill = array_of(node.inputs[2]) if len(node.inputs) > 2 else None
    mode = attribute(node, "mode", "constant")
    if pads is None or axes is None or mode not in _PADDING or min(pads) < 0:
        raise UnsupportedOperator("Pad with computed or negative widths, or an unknown mode")
    around = {axis_of(a, rank) + 4 - rank: (pads[i], pads[i + len(axes)]) for i, a in enumerate(axes) if a % rank}
    if any(pads[i] or pads[i + len(axes)] for i, axis in enumerate(axes) if axis % rank == 0):
        raise UnsupportedOperator("Pad along the batch")
    (front, behind), (top, bottom), (left, right) = (around.get(axis, (0, 0)) for axis in range(3))
    if (front or behind) and mode != "constant":
        raise UnsupportedOperator(f"Pad of channels with mode {mode}")
    parameters: dict[int, LayerParameter] = {0: top, 1: bottom, 2: left, 3: right, 4: _PADDING[mode]}
    parameters |= {5: 0.0 if fill is None else float(fill.item()), 7: front, 8: behind}
    writer.add("Padding", node, [writer.blob(node.inputs[0])], parameters)


def _slice(writer: LayerWriter, node: ir.Node) -> None:
    """Convert to Crop and, for steps, a pooling with a window of one pixel."""
    shape = shape_of(node.inputs[0])
    lists = [ints_of(value) for value in node.inputs[1:]]
    if any(found is None for found in lists) or len(lists) < 3:
        raise UnsupportedOperator("Slice with computed bounds")
    starts, ends, axes, *rest = (found or [] for found in lists)
    steps = rest[0] if rest else [1] * len(axes)
    ranges = [
        range(*slice(*bounds).indices(shape[axis])) for axis, *bounds in zip(axes, starts, ends, steps, strict=True)
    ]
    if any(step < 1 for step in steps) or not all(ranges):
        raise UnsupportedOperator("Slice with negative steps or an empty result")
    by_axis = {axis % len(shape): found for axis, found in zip(axes, ranges, strict=True)}
    if len(by_axis.pop(0, range(1))) != 1:
        raise UnsupportedOperator("Slice along the batch")
    if any(found.step > 1 and (len(shape) != 4 or axis == 1) for axis, found in by_axis.items()):
        raise UnsupportedOperator("Slice with steps along an axis other than rows or columns of an image")
    blob = writer.blob(node.inputs[0])
    last = {axis: found[-1] + 1 for axis, found in by_axis.items()}
    cut = [axis for axis, found in by_axis.items() if found[0] > 0 or shape[axis] - last[axis] >= found.step]
    if cut:
        bounds = {
            9: tuple(by_axis[axis][0] for axis in cut),
            10: tuple(last[axis] for axis in cut),
            11: tuple(axis - 1 for axis in cut),
        }
        crop = writer.add("Crop", f"{node.outputs[0].name}.cut", [blob], dict(bounds))
        blob = crop.writes[0]
    rows, columns = (by_axis[axis].step if axis in by_axis else 1 for axis in (2, 3))
    if rows == columns == 1:
        writer.alias(node.outputs[0], blob)
        return
    writer.add("Pooling", node, [blob], {0: 0, 1: 1, 11: 1, 2: columns, 12: rows, 5: 1})


def _split(writer: LayerWriter, node: ir.Node) -> None:
    rank = len(shape_of(node.inputs[0]))
    axis = attribute(node, "axis", 0)
    parts = tuple(shape_of(value)[axis % rank] for value in node.outputs)
    reads = [writer.blob(node.inputs[0])]
    writer.add("Slice", node, reads, {0: parts, 1: axis_of(axis, rank)}, writes=len(parts))


def _batch_norm(writer: LayerWriter, node: ir.Node) -> None:
    """Convert an unfolded batch norm to scale and bias per channel."""
    slope, bias, mean, variance = (array_of(value) for value in node.inputs[1:5])
    if slope is None or bias is None or mean is None or variance is None:
        raise UnsupportedOperator("a batch norm with computed statistics")
    weights = [LayerWeight(part.astype(np.float32)) for part in (slope, mean, variance, bias)]
    parameters: dict[int, LayerParameter] = {0: prod(slope.shape), 1: float(attribute(node, "epsilon", 1e-5))}
    writer.add("BatchNorm", node, [writer.blob(node.inputs[0])], parameters, weights)


OPERATORS: dict[str, Write] = {
    "Abs": _unary(0),
    "Add": _binary(0, 0),
    "AveragePool": _pool(1),
    "BatchNormalization": _batch_norm,
    "Clip": _clip,
    "Concat": _concat,
    "Conv": conv,
    "Div": _binary(3, 8),
    "Elu": _plain("ELU", alpha=(0, 1.0)),
    "Exp": _unary(7),
    "Flatten": _reshape,
    "Gemm": gemm,
    "GlobalAveragePool": _global_pool(1),
    "GlobalMaxPool": _global_pool(0),
    "HardSigmoid": _plain("HardSigmoid", alpha=(0, 0.2), beta=(1, 0.5)),
    "HardSwish": _hard_swish,
    "Identity": _identity,
    "LeakyRelu": _plain("ReLU", alpha=(0, 0.01)),
    "MatMul": matmul,
    "Max": _binary(4, 4),
    "MaxPool": _pool(0),
    "Min": _binary(5, 5),
    "Mul": _binary(2, 2),
    "Neg": _unary(1),
    "Pad": _pad,
    "Reciprocal": _unary(15),
    "ReduceMax": _reduce(4, 0),
    "ReduceMean": _reduce(3, 1),
    "Relu": _plain("ReLU"),
    "Reshape": _reshape,
    "Sigmoid": _plain("Sigmoid"),
    "Slice": _slice,
    "Softmax": _softmax,
    "Sqrt": _unary(5),
    "Split": _split,
    "Squeeze": _reshape,
    "Sub": _binary(1, 7),
    "Tanh": _plain("TanH"),
    "Unsqueeze": _reshape,
}
