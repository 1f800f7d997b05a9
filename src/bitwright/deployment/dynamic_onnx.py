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

_FLOAT, _CODES = ir.DataType.FLOAT, ir.DataType.UINT8
_SHIFT = 128
"""Signed codes are stored with this offset: ONNX Runtime has fast x86 kernels only for unsigned activations (20x)."""

Constant = Callable[[str, NDArray[Any]], ir.Value]


@dataclass(frozen=True)
class DynamicValue:
    """A quantized activation: unsigned codes, scale, and zero point."""

    codes: ir.Value
    scale: ir.Value
    zero_point: ir.Value
    by_tensor: bool
    symmetric: bool


class DynamicWriter:
    """Writes dynamic sites into a graph, then replaces products with integer weights by integer operators."""

    def __init__(self, graph: ir.Graph, constant: Constant, unique: Callable[[str], str]) -> None:
        self.graph, self.constant, self.unique = graph, constant, unique
        self.values: dict[ir.Value, DynamicValue] = {}  # dequantized value → its codes
        self.written: dict[tuple[str, str], ir.Value] = {}  # (source, format) → the dequantized value
        self.quantize_linears = 0
        self.ones: dict[ir.Value, ir.Value] = {}  # scales of tokens → run-time 1
        self.distances: dict[ir.Value, ir.Value] = {}  # zero points of tokens → 128 minus these

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
            self._replace(node, found, stored)

    def _replace(self, node: ir.Node, data: DynamicValue, weight: _StoredMatrix) -> None:
        output = node.outputs[0]
        insert = _Inserter(self, node, str(output.name))
        each = not (data.by_tensor or data.symmetric)  # MatMulInteger has one zero point for all tokens
        codes = self.constant(f"{weight.name}.matrix", weight.codes) if weight.turned else weight.value
        scale = self.constant(f"{weight.name}.columns", weight.scale)
        zeros = [self.constant(f"{weight.name}.shift", np.array(_SHIFT, np.uint8)) if each else data.zero_point]
        if weight.zero_point is not None:
            zeros.append(self.constant(f"{weight.name}.offset", weight.zero_point))
        products = insert.node("MatMulInteger", [data.codes, codes, *zeros], "products", ir.DataType.INT32)
        wide = insert.node("Cast", [products], "wide", _FLOAT, to=_FLOAT)
        # ONNX Runtime fuses the four operators if one scalar and the scales of the columns are multiplied first.
        scalar = data.scale if data.by_tensor else self._one(insert, data.scale)
        both = insert.node("Mul", [scalar, scale], "scale", _FLOAT)
        result = insert.node("Mul", [wide, both], "scaled", _FLOAT)
        if each:  # Σ (a − z)·w = Σ (a − 128)·w + (128 − z)·Σ w
            sums = self.constant(f"{weight.name}.sums", weight.sums)
            moved = insert.node("Mul", [self._distance(insert, data), sums], "moved", _FLOAT)
            result = insert.node("Add", [result, moved], "whole", _FLOAT)
        if not data.by_tensor:
            result = insert.node("Mul", [result, data.scale], "tokens", _FLOAT)
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        if bias is not None:
            result = insert.node("Add", [result, bias], "biased", _FLOAT)
        result.shape, result.type = output.shape, output.type
        ir.convenience.replace_all_uses_with(output, result, replace_graph_outputs=True)
        name = output.name
        self.graph.remove(node, safe=True)
        result.name = name

    def _distance(self, insert: _Inserter, data: DynamicValue) -> ir.Value:
        """128 − zero point of each token. Products that read the same tensor share it."""
        if data.zero_point not in self.distances:
            zero = insert.node("Cast", [data.zero_point], "zero_float", _FLOAT, to=_FLOAT)
            self.distances[data.zero_point] = insert.node(
                "Sub", [insert.constant("shift", float(_SHIFT)), zero], "distance", _FLOAT
            )
        return self.distances[data.zero_point]

    def _one(self, insert: _Inserter, scale: ir.Value) -> ir.Value:
        """1 as a run-time value: a constant would be folded into the scales before ONNX Runtime fuses operators."""
        if scale not in self.ones:
            highest = insert.node("ReduceMax", [scale], "highest", _FLOAT, keepdims=0)
            self.ones[scale] = insert.node("Div", [highest, highest], "one", _FLOAT)
        return self.ones[scale]


@dataclass(frozen=True)
class _StoredMatrix:
    name: str
    value: ir.Value
    codes: NDArray[Any]
    """(input, output)"""
    scale: NDArray[Any]
    zero_point: NDArray[Any] | None
    turned: bool

    @property
    def sums(self) -> NDArray[Any]:
        """The sum of each column's weights."""
        offset = 0 if self.zero_point is None else self.zero_point.astype(np.int64)
        whole: NDArray[Any] = (self.codes.astype(np.int64) - offset).sum(axis=0) * self.scale.astype(np.float64)
        return whole.astype(np.float32)


def _stored_matrix(node: ir.Node, weight: ir.Value) -> _StoredMatrix | None:
    """The 8-bit weights before a DequantizeLinear, with scales per tensor or per output channel."""
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
        return DynamicValue(made.outputs[0], made.outputs[1], made.outputs[2], by_tensor=True, symmetric=False)

    def quantize(self, source: ir.Value, quantizer: Quantizer) -> DynamicValue:
        """The operators of `grid_from_range` and of rounding to this grid."""
        format, by_tensor = quantizer.format, quantizer.layout.granularity == "tensor"
        shift = _SHIFT if format.signed else 0
        low, high = (self._extreme(op, source, quantizer) for op in ("ReduceMin", "ReduceMax"))
        smallest = self.constant("smallest", SMALLEST)
        if format.symmetric:
            # The smallest scale is positive, so a limit on the wrong side of 0 doesn't count.
            ends = [("high", high, format.qmax), *([("low", low, format.qmin)] if format.signed else [])]
            reached = [
                self.node("Div", [end, self.constant(f"{n}_code", c)], f"{n}_scale", _FLOAT) for n, end, c in ends
            ]
            scale = self.node("Max", [*reached, smallest], "scale", _FLOAT)
            zero = self.writer.constant(f"{self.site}.shift", np.array(shift, np.uint8))
        else:
            low, high = (
                self.node(op, [end, self.constant("zero", 0.0)], op.lower(), _FLOAT)
                for op, end in (("Min", low), ("Max", high))
            )
            span = self.node("Sub", [high, low], "span", _FLOAT)
            even = self.node("Div", [span, self.constant("codes_between", format.qmax - format.qmin)], "even", _FLOAT)
            scale = self.node("Max", [even, smallest], "scale", _FLOAT)
            steps = self.node("Round", [self.node("Div", [low, scale], "low_steps", _FLOAT)], "low_code", _FLOAT)
            first, last = (
                self.constant(f"{n}est", code + shift) for n, code in (("low", format.qmin), ("high", format.qmax))
            )
            zero = self.node(
                "Clip", [self.node("Sub", [first, steps], "offset", _FLOAT), first, last], "offset_code", _FLOAT
            )
            zero = self.node("Cast", [zero], "zero_point", _CODES, to=_CODES)
        # The ranges contain all values, so saturation to 8 bits clips as the format does.
        if by_tensor and (format.symmetric or format.qmax - format.qmin == 255):
            codes = self._quantize_linear(source, scale, zero)
        elif format.symmetric:  # OpenVINO can't read a QuantizeLinear whose scales have an unknown length
            steps = self.node("Div", [source, scale], "steps", _FLOAT)
            codes = self._quantize_linear(steps, self.constant("step", 1.0), zero)
        else:
            codes = self._rounded(source, scale, zero, format.qmin + shift, format.qmax + shift)
        codes.shape = source.shape
        return DynamicValue(codes, scale, zero, by_tensor=by_tensor, symmetric=format.symmetric)

    def _quantize_linear(self, source: ir.Value, scale: ir.Value, zero: ir.Value) -> ir.Value:
        self.writer.quantize_linears += 1
        return self.node("QuantizeLinear", [source, scale, zero], "unsigned", _CODES)

    def _rounded(self, source: ir.Value, scale: ir.Value, zero: ir.Value, lowest: int, highest: int) -> ir.Value:
        steps = self.node("Round", [self.node("Div", [source, scale], "steps", _FLOAT)], "rounded", _FLOAT)
        shifted = self.node("Add", [steps, self.node("Cast", [zero], "offsets", _FLOAT, to=_FLOAT)], "shifted", _FLOAT)
        ends = [self.constant("first_code", lowest), self.constant("last_code", highest)]
        clipped = self.node("Clip", [shifted, *ends], "clipped", _FLOAT)
        return self.node("Cast", [clipped], "unsigned", _CODES, to=_CODES)

    def _extreme(self, op: str, source: ir.Value, quantizer: Quantizer) -> ir.Value:
        """The minimum or maximum per tensor or token."""
        layout, axes = quantizer.layout, []
        if layout.granularity == "token":
            axes = [self.writer.constant(f"{self.site}.axis", np.array([layout.axis], np.int64))]
        return self.node(op, [source, *axes], op.lower(), _FLOAT, keepdims=int(layout.granularity == "token"))

    def dequantize(self, found: DynamicValue) -> ir.Value:
        """(codes − zero point)·scale in float."""
        value = self.node("Cast", [found.codes], "float_codes", _FLOAT, to=_FLOAT)
        zero = self.node("Cast", [found.zero_point], "float_zero", _FLOAT, to=_FLOAT)
        value = self.node("Sub", [value, zero], "centred", _FLOAT)
        return self.node("Mul", [value, found.scale], "value", _FLOAT)
