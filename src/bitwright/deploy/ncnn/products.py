"""Convolutions and linears: in integers where both operands have codes, else in float."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.deploy.ncnn.layers import INT8, Layer, Parameter, Reading, Weight, factor
from bitwright.deploy.ncnn.reading import Codes, Unwritable, array_of, codes_of, rounded, shape_of
from bitwright.deploy.operator_names import operator_of

if TYPE_CHECKING:
    from bitwright.deploy.ncnn.writer import Writer

_LEFT, _TOP, _RIGHT, _BOTTOM = 4, 14, 15, 16  # parameters of a convolution's padding


def attribute(node: ir.Node, name: str, default: Any) -> Any:
    """An attribute's plain value."""
    found = node.attributes.get(name)
    return default if found is None else found.value


def conv(writer: Writer, node: ir.Node) -> None:
    """Convolution, or ConvolutionDepthWise for groups."""
    weight = array_of(node.inputs[1])
    if weight is None:
        raise Unwritable("a convolution with a computed weight")
    if weight.ndim != 4:
        raise Unwritable(f"a convolution with {weight.ndim - 2} spatial axes")
    if attribute(node, "auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise Unwritable("a convolution with auto_pad")
    group = attribute(node, "group", 1)
    outputs, _, height, width = weight.shape
    top, left, bottom, right = attribute(node, "pads", [0, 0, 0, 0])
    strides, dilations = attribute(node, "strides", [1, 1]), attribute(node, "dilations", [1, 1])
    parameters: dict[int, Parameter] = {
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


def gemm(writer: Writer, node: ir.Node) -> None:
    """InnerProduct."""
    if attribute(node, "alpha", 1.0) != 1 or attribute(node, "beta", 1.0) != 1 or attribute(node, "transA", 0):
        raise Unwritable("a Gemm with alpha, beta or transA")
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    _linear(writer, node, bias, turned=bool(attribute(node, "transB", 0)))


def matmul(writer: Writer, node: ir.Node) -> None:
    """InnerProduct, if the right operand is constant."""
    _linear(writer, node, None, turned=False)


def _linear(writer: Writer, node: ir.Node, bias: ir.Value | None, *, turned: bool) -> None:
    weight, codes = array_of(node.inputs[1]), codes_of(node.inputs[1])
    if weight is None or weight.ndim != 2 or len(shape_of(node.inputs[0])) != 2:
        raise Unwritable(f"{node.op_type} that isn't a linear of one vector a sample")
    if not turned:  # ncnn wants a row for each output
        weight = weight.T
        if codes is not None:
            codes = Codes(codes.site, codes.codes.T, codes.scale, None if codes.axis is None else 1 - codes.axis)
    parameters: dict[int, Parameter] = {0: weight.shape[0], 2: weight.size}
    _product(writer, node, "InnerProduct", codes, weight, bias, parameters, bias_at=1, groups=1)


def _product(
    writer: Writer,
    node: ir.Node,
    kind: str,
    codes: Codes | None,
    weight: NDArray[Any],
    bias: ir.Value | None,
    parameters: dict[int, Parameter],
    *,
    bias_at: int,
    groups: int,
) -> None:
    read = rounded(node.inputs[0])
    integer = read is not None and codes is not None
    weights = [Weight(weight.astype(np.float32), tagged=True)]
    if integer:
        assert codes is not None
        weights = [Weight(_int8(codes), tagged=True, name=f"{codes.site}.codes")]
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
        Weight(factors, name=f"{codes.site}.factor"),
        Weight(factor(read.scale).reshape(1), name=f"{read.site}.factor"),
    ]
    name = codes.site.removesuffix(":weight")
    layer: Layer = writer.add(kind, node, [writer.blob(read.source)], parameters, weights, name=name)
    writer.net.sites.setdefault(read.site, Reading(layer, read.scale))
    writer.net.scales[codes.site] = codes.scale


def _int8(codes: Codes) -> NDArray[np.int8]:
    if codes.codes.min(initial=0) < -127 or codes.codes.max(initial=0) > 127:
        raise Unwritable(f"codes other than −127 to 127 around 0 at {codes.site}")
    return codes.codes.astype(np.int8)


def _factors(codes: Codes, outputs: int, groups: int) -> NDArray[np.float32]:
    """One for each output, or for each group."""
    if codes.axis not in (None, 0):
        raise Unwritable(f"scales along the inputs at {codes.site}")
    found = np.broadcast_to(factor(codes.scale).ravel(), (outputs,))
    if groups == 1:
        return found.copy()
    grouped = found.reshape(groups, -1)
    if not (grouped == grouped[:, :1]).all():
        raise Unwritable(f"more than one scale for a group of channels (use int8/tensor/sym/narrow) at {codes.site}")
    return grouped[:, 0].copy()


def _bias(value: ir.Value) -> Weight:
    numbers, codes = array_of(value), codes_of(value)
    if numbers is None:
        raise Unwritable("a computed bias")
    return Weight(numbers.astype(np.float32).ravel(), name=None if codes is None else f"{codes.site}.value")
