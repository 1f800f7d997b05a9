"""ONNX operators for activations with scales that are computed at run time, and integer products with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.quantizers import Quantizer
from bitwright.quantizers.grid import SMALLEST

_FLOAT = ir.DataType.FLOAT
_TYPES = {True: ir.DataType.INT8, False: ir.DataType.UINT8}

Constant = Callable[[str, NDArray[Any]], ir.Value]


@dataclass(frozen=True)
class DynamicValue:
    """A quantized activation: codes, scale, and zero point (None for symmetric formats)."""

    codes: ir.Value
    scale: ir.Value
    zero_point: ir.Value | None
    by_tensor: bool


class DynamicWriter:
    """Writes dynamic sites into a graph, then replaces products with integer weights by integer operators."""

    def __init__(self, graph: ir.Graph, constant: Constant, unique: Callable[[str], str]) -> None:
        self.graph, self.constant, self.unique = graph, constant, unique
        self.values: dict[ir.Value, DynamicValue] = {}  # by the dequantized value
        self.written: dict[tuple[str, str], ir.Value] = {}  # (source, format) → the dequantized value

    def quantize(self, before: ir.Node, source: ir.Value, site: str, quantizer: Quantizer) -> ir.Value:
        """Insert operators that quantize `source`; returns the dequantized value. Equal sites share them."""
        key = (str(source.name), str(quantizer.format))
        if key not in self.written:
            insert = _Inserter(self, before, site)
            format = quantizer.format
            if (format.name, format.granularity, format.symmetric, format.narrow) == ("uint8", "tensor", False, False):
                found = insert.dynamic_quantize_linear(source)
            else:
                found = insert.quantize(source, quantizer)
            value = insert.dequantize(found)
            self.values[value] = found
            self.written[key] = value
        return self.written[key]

    def use_integers(self) -> None:
        """Compute MatMul and Gemm with integers if one operand is dynamic and the other a matrix of 8-bit weights.

        Other products keep dequantized operands and run in float, with the same values.
        """
        for node in [node for node in self.graph if node.op_type in ("MatMul", "Gemm") and not node.domain]:
            data, weight = node.inputs[0], node.inputs[1]
            found = None if data is None else self.values.get(data)
            stored = None if weight is None else _stored_matrix(node, weight)
            if found is None or stored is None or not _is_plain_product(node):
                continue
            if found.by_tensor or found.zero_point is None:  # MatMulInteger has one zero point for all tokens
                self._replace(node, found, stored)

    def _replace(self, node: ir.Node, data: DynamicValue, weight: _StoredMatrix) -> None:
        output = node.outputs[0]
        insert = _Inserter(self, node, str(output.name))
        codes = self.constant(f"{weight.name}.matrix", weight.codes) if weight.turned else weight.value
        scale = self.constant(f"{weight.name}.columns", weight.scale)
        zeros = [] if data.zero_point is None else [data.zero_point]
        if weight.zero_point is not None:
            type = np.int8 if data.codes.dtype == ir.DataType.INT8 else np.uint8
            zeros = zeros or [self.constant(f"{weight.name}.no_offset", np.zeros((), type))]
            zeros.append(self.constant(f"{weight.name}.offset", weight.zero_point))
        products = insert.node("MatMulInteger", [data.codes, codes, *zeros], "products", ir.DataType.INT32)
        wide = insert.node("Cast", [products], "wide", _FLOAT, to=_FLOAT)
        if data.by_tensor:  # in this order, ONNX Runtime fuses them into one operator
            both = insert.node("Mul", [data.scale, scale], "scale", _FLOAT)
            result = insert.node("Mul", [wide, both], "scaled", _FLOAT)
        else:
            columns = insert.node("Mul", [wide, scale], "columns", _FLOAT)
            result = insert.node("Mul", [columns, data.scale], "scaled", _FLOAT)
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        if bias is not None:
            result = insert.node("Add", [result, bias], "biased", _FLOAT)
        result.shape, result.type = output.shape, output.type
        ir.convenience.replace_all_uses_with(output, result, replace_graph_outputs=True)
        name = output.name
        self.graph.remove(node, safe=True)
        result.name = name


@dataclass(frozen=True)
class _StoredMatrix:
    name: str
    value: ir.Value
    codes: NDArray[Any]
    """(input, output)"""
    scale: NDArray[Any]
    zero_point: NDArray[Any] | None
    turned: bool


def _stored_matrix(node: ir.Node, weight: ir.Value) -> _StoredMatrix | None:
    """The 8-bit weights behind a DequantizeLinear, per tensor or per output channel."""
    producer = weight.producer()
    if producer is None or producer.op_type != "DequantizeLinear" or "block_size" in producer.attributes:
        return None
    codes, scale, *rest = producer.inputs
    if codes is None or scale is None or codes.const_value is None or scale.const_value is None:
        return None
    if codes.dtype not in (ir.DataType.INT8, ir.DataType.UINT8) or codes.shape is None or len(codes.shape) != 2:
        return None
    array, scales = codes.const_value.numpy(), scale.const_value.numpy()
    turned = "transB" in node.attributes and bool(node.attributes["transB"].as_int())
    axis = producer.attributes["axis"].as_int() % 2 if "axis" in producer.attributes else 1
    if scales.ndim and axis != (0 if turned else 1):
        return None
    zero = rest[0] if rest else None
    offset = None if zero is None or zero.const_value is None else zero.const_value.numpy()
    if offset is not None and not offset.any():
        offset = None
    return _StoredMatrix(
        name=str(codes.name).removesuffix(".codes"),
        value=codes,
        codes=np.ascontiguousarray(array.T) if turned else array,
        scale=scales,
        zero_point=offset,
        turned=turned,
    )


def _is_plain_product(node: ir.Node) -> bool:
    """Whether a Gemm multiplies and adds without factors, and doesn't transpose its data."""
    if node.op_type == "MatMul":
        return True
    factors = all(node.attributes[name].as_float() == 1.0 for name in ("alpha", "beta") if name in node.attributes)
    return factors and not ("transA" in node.attributes and node.attributes["transA"].as_int())


class _Inserter:
    """Inserts nodes before one node, with names that begin with a site."""

    def __init__(self, writer: DynamicWriter, before: ir.Node, site: str) -> None:
        self.writer, self.before, self.site = writer, before, site

    def node(self, op: str, inputs: list[ir.Value], name: str, type: ir.DataType, **attributes: Any) -> ir.Value:
        attrs = [ir.convenience.convert_attribute(key, value) for key, value in attributes.items()]
        made = ir.Node("", op, inputs, attributes=attrs, name=self.writer.unique(f"{op}:{self.site}.{name}"))
        output = made.outputs[0]
        output.name, output.dtype = self.writer.unique(f"{self.site}.{name}"), type
        self.writer.graph.insert_before(self.before, made)
        return output

    def constant(self, name: str, value: float) -> ir.Value:
        return self.writer.constant(f"{self.site}.{name}", np.array(value, np.float32))

    def dynamic_quantize_linear(self, source: ir.Value) -> DynamicValue:
        made = ir.Node(
            "", "DynamicQuantizeLinear", [source], num_outputs=3, name=self.writer.unique(f"Quantize:{self.site}")
        )
        for output, name, type in zip(
            made.outputs, ("codes", "scale", "zero_point"), (ir.DataType.UINT8, _FLOAT, ir.DataType.UINT8), strict=True
        ):
            output.name, output.dtype = self.writer.unique(f"{self.site}.{name}"), type
        made.outputs[0].shape = source.shape
        self.writer.graph.insert_before(self.before, made)
        return DynamicValue(made.outputs[0], made.outputs[1], made.outputs[2], by_tensor=True)

    def quantize(self, source: ir.Value, quantizer: Quantizer) -> DynamicValue:
        """The operators of `grid_from_range` and of rounding to this grid."""
        format, by_tensor = quantizer.format, quantizer.layout.granularity == "tensor"
        low, high = (self._extreme(op, source, quantizer) for op in ("ReduceMin", "ReduceMax"))
        if format.symmetric:
            ends = [
                self.node("Div", [end, self.constant(f"{name}_code", float(code))], f"{name}_scale", _FLOAT)
                for name, end, code in (("low", low, format.qmin), ("high", high, format.qmax))
            ]
            scale = self.node("Max", ends, "widest", _FLOAT)
        else:
            span = self.node("Sub", [high, low], "span", _FLOAT)
            scale = self.node("Div", [span, self.constant("codes_between", format.qmax - format.qmin)], "even", _FLOAT)
        scale = self.node("Max", [scale, self.constant("smallest", SMALLEST)], "scale", _FLOAT)
        steps = self.node("Round", [self.node("Div", [source, scale], "steps", _FLOAT)], "rounded", _FLOAT)
        ends = [self.constant("lowest", format.qmin), self.constant("highest", format.qmax)]
        zero: ir.Value | None = None
        if not format.symmetric:
            shift = self.node("Round", [self.node("Div", [low, scale], "low_steps", _FLOAT)], "low_code", _FLOAT)
            zero = self.node("Sub", [ends[0], shift], "offset", _FLOAT)
            zero = self.node("Clip", [zero, *ends], "offset_code", _FLOAT)
            steps = self.node("Add", [steps, zero], "shifted", _FLOAT)
        clipped = self.node("Clip", [steps, *ends], "clipped", _FLOAT)
        type = _TYPES[format.signed]
        codes = self.node("Cast", [clipped], "codes", type, to=type)
        codes.shape = source.shape
        if zero is not None:
            zero = self.node("Cast", [zero], "zero_point", type, to=type)
        return DynamicValue(codes, scale, zero, by_tensor=by_tensor)

    def _extreme(self, op: str, source: ir.Value, quantizer: Quantizer) -> ir.Value:
        """The minimum or maximum per tensor or token, including 0."""
        layout, axes = quantizer.layout, []
        if layout.granularity == "token":
            axes = [self.writer.constant(f"{self.site}.axis", np.array([layout.axis], np.int64))]
        found = self.node(op, [source, *axes], op.lower(), _FLOAT, keepdims=int(layout.granularity == "token"))
        bound = "Min" if op == "ReduceMin" else "Max"
        return self.node(bound, [found, self.constant("zero", 0.0)], bound.lower(), _FLOAT)

    def dequantize(self, found: DynamicValue) -> ir.Value:
        """(codes − zero point)·scale in float."""
        value = self.node("Cast", [found.codes], "float_codes", _FLOAT, to=_FLOAT)
        if found.zero_point is not None:
            zero = self.node("Cast", [found.zero_point], "float_zero", _FLOAT, to=_FLOAT)
            value = self.node("Sub", [value, zero], "centred", _FLOAT)
        return self.node("Mul", [value, found.scale], "value", _FLOAT)
