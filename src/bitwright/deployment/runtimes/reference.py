"""`reference`: executes a Q/DQ model with integers only, in NumPy, like a target without floats."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from bitwright.core.errors import ArtefactError
from bitwright.deployment.runtimes.base import OnnxReader, input_error
from bitwright.deployment.runtimes.reference_operators import (
    MOVES,
    OPERATORS,
    Integers,
    Value,
    fixed_point,
    requantize,
    uniform,
)


class Reference(OnnxReader):
    """Integer products, int32 sums and fixed-point rescaling. Float operators of the plan run in float."""

    name = "reference"
    deploys = False

    @staticmethod
    def missing() -> str | None:
        """Always available: NumPy and onnx are dependencies."""
        return None

    def __init__(self, path: Path, *, threads: int | None = None) -> None:
        self.model = onnx.load(path)
        graph = self.model.graph
        self.constants: dict[str, NDArray[Any]] = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
        self.inputs = tuple(value.name for value in graph.input if value.name not in self.constants)
        self.outputs = tuple(value.name for value in graph.output)
        firsts = [value.type.tensor_type.shape.dim[:1] for value in graph.input if value.name in self.inputs]
        sizes = [dim[0].dim_value for dim in firsts if dim]
        self.batch = sizes[0] if sizes and all(sizes) else None  # a dynamic axis has no value
        self.evaluators: dict[int, ReferenceEvaluator] = {}
        self.in_integers: list[str] = []
        """The operators of the last run that ran in integers, by their first output."""
        self.in_float: list[str] = []
        self._given: Mapping[str, NDArray[Any]] = {}
        self._differences: dict[str, int] = {}

    def compare(self, feed: dict[str, NDArray[Any]], simulated: Mapping[str, NDArray[Any]]) -> dict[str, int]:
        """The largest difference of codes at each site if every operator reads the simulation's codes.

        A sum near a rounding boundary may change a code by one, and the difference may grow in later operators. Here
        each site is compared independently.
        """
        self._given, self._differences = simulated, {}
        try:
            self.run(feed)
        finally:
            self._given = {}
        return self._differences

    def run(self, feed: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """Run node by node."""
        self.in_integers, self.in_float = [], []
        values: dict[str, Value] = {"": None, **self.constants, **feed}
        try:
            for index, node in enumerate(self.model.graph.node):
                results = self._node(index, node, [values[name] for name in node.input])
                values.update(zip(node.output, results, strict=False))
        except ArtefactError:
            raise
        except Exception as error:  # NumPy's errors for mismatched shapes
            raise input_error(self.name, error) from error
        return [_array(values[name]) for name in self.outputs]

    def _node(self, index: int, node: onnx.NodeProto, values: list[Value]) -> list[Value]:
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        if node.op_type == "QuantizeLinear":
            return [self._checked(node.output[0].removesuffix(".codes"), _quantize(values, attributes))]
        if node.op_type == "DequantizeLinear":
            return [_dequantize(values, attributes)]
        found: Integers | None = None
        if node.op_type in MOVES and isinstance(values[0], Integers):
            x = uniform(values[0])
            moved = self._evaluate(index, node, [x.codes, *values[1:]])
            self.in_integers.append(node.output[0])
            return [Integers(codes=codes, scale=x.scale, zero_point=x.zero_point, bits=x.bits) for codes in moved]
        if node.op_type == "Add":  # convert constant operands to fixed point
            values = [self._fixed(name, value) for name, value in zip(node.input, values, strict=True)]
        if node.op_type in OPERATORS:
            found = OPERATORS[node.op_type](attributes, *values)
        if found is not None:
            self.in_integers.append(node.output[0])
            return [found]
        if any(
            np.asarray(v).dtype.kind == "f" if not isinstance(v, Integers) else True for v in values if v is not None
        ):
            self.in_float.append(node.output[0])
        return self._evaluate(index, node, [v.real() if isinstance(v, Integers) else v for v in values])

    def _checked(self, site: str, found: Integers) -> Integers:
        given = self._given.get(site)
        if given is None:
            return found
        self._differences[site] = int(np.abs(found.codes - given).max(initial=0))
        return replace(found, codes=given.astype(np.int64))

    def _fixed(self, name: str, value: Value) -> Value:
        constant = name in self.constants and isinstance(value, np.ndarray) and value.dtype.kind == "f"
        return fixed_point(self.constants[name]) if constant else value

    def _evaluate(self, index: int, node: onnx.NodeProto, values: list[Any]) -> list[Any]:
        """Run a node without an integer implementation with onnx's evaluator."""
        if index not in self.evaluators:
            names = [name for name in dict.fromkeys(node.input) if name]
            unknown = onnx.TypeProto()
            graph = onnx.helper.make_graph(
                [node],
                "node",
                [onnx.helper.make_value_info(name, unknown) for name in names],
                [onnx.helper.make_value_info(name, unknown) for name in node.output if name],
            )
            self.evaluators[index] = ReferenceEvaluator(
                onnx.helper.make_model(graph, opset_imports=self.model.opset_import)
            )
        feed = {name: value for name, value in zip(node.input, values, strict=True) if name}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # overflows that the operator handles (exp, softmax)
            return list(self.evaluators[index].run(None, feed))


def _array(value: Value) -> NDArray[Any]:
    assert value is not None
    if not isinstance(value, Integers):
        return value
    return value.real() if value.stored is None else value.codes.astype(value.stored)


def _limits(kind: Any) -> tuple[int, int]:
    narrow: Any = ml_dtypes.iinfo  # for four bits and less
    info = np.iinfo(kind) if np.issubdtype(kind, np.integer) else narrow(kind)
    return int(info.min), int(info.max)


def _spread(part: NDArray[Any], rank: int, axis: int) -> NDArray[Any]:
    return part.reshape(()) if part.size == 1 else part.reshape([-1 if i == axis % rank else 1 for i in range(rank)])


def _quantize(values: list[Value], attributes: dict[str, Any]) -> Integers:
    x, scale, zero = values
    assert isinstance(scale, np.ndarray) and isinstance(zero, np.ndarray) and x is not None
    rank, axis = (x.codes.ndim if isinstance(x, Integers) else x.ndim), attributes.get("axis", 1)
    wide, zero_point = _spread(scale, rank, axis).astype(np.float64), _spread(zero.astype(np.int64), rank, axis)
    low, high = _limits(zero.dtype)
    if isinstance(x, Integers):
        codes = requantize(x, wide, zero_point, low, high)
    else:
        rounded = np.rint(x.astype(np.float32) / _spread(scale, rank, axis)).astype(np.int64)
        codes = np.clip(rounded + zero_point, low, high)
    bits = int(high - min(low, 0)).bit_length()
    return Integers(codes=codes, scale=wide, zero_point=zero_point, bits=bits, stored=zero.dtype)


def _dequantize(values: list[Value], attributes: dict[str, Any]) -> Value:
    x, scale, *rest = values
    if isinstance(x, Integers):
        return Integers(codes=x.codes, scale=x.scale, zero_point=x.zero_point, bits=x.bits)
    assert isinstance(x, np.ndarray) and isinstance(scale, np.ndarray)
    codes = x.astype(np.int64)
    zero = np.zeros(scale.shape, np.int64) if not rest or rest[0] is None else _array(rest[0]).astype(np.int64)
    axis = attributes.get("axis", 1)
    if attributes.get("block_size", 0):  # blocked scales aren't possible in integer sums, so the operator runs in float
        spread = [np.repeat(part, attributes["block_size"], axis=axis) for part in (scale, zero)]
        return ((codes - spread[1]) * spread[0]).astype(np.float32)
    if x.ndim == 0 or scale.size == 1:
        return Integers(
            codes=codes, scale=scale.astype(np.float64).reshape(()), zero_point=zero.reshape(()), bits=_bits(x)
        )
    return Integers(
        codes=codes,
        scale=_spread(scale, x.ndim, axis).astype(np.float64),
        zero_point=_spread(zero, x.ndim, axis),
        bits=_bits(x),
    )


def _bits(x: NDArray[Any]) -> int:
    low, high = _limits(x.dtype)
    return int(high - min(low, 0)).bit_length()
