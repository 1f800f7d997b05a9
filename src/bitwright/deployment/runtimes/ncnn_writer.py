"""Convert an ONNX graph to ncnn's layers: read its constants, shapes and Q/DQ pairs, and collect the layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.core.errors import ExportError
from bitwright.deployment.runtimes.ncnn_layers import Layer, LayerParameter, LayerWeight, Net, Reading, factor

_CODES = 127
_SKIPPED = ("QuantizeLinear", "DequantizeLinear", "Constant")  # handled by their readers


class UnsupportedOperator(Exception):
    """ncnn doesn't support an operator; the text is the reason."""


@dataclass(frozen=True)
class Rounded:
    """An activation between Q and DQ."""

    source: ir.Value
    site: str
    scale: float


@dataclass(frozen=True)
class ConstantCodes:
    """A constant before a DQ."""

    site: str
    codes: NDArray[Any]
    scale: NDArray[np.float32]
    axis: int | None

    @property
    def numbers(self) -> NDArray[np.float32]:
        """The values of the codes."""
        scale = self.scale
        if self.axis is not None:
            scale = scale.reshape([-1 if axis == self.axis else 1 for axis in range(self.codes.ndim)])
        return (self.codes.astype(np.float64) * scale).astype(np.float32)


def array_of(value: ir.Value | None) -> NDArray[Any] | None:
    """The values of a constant, dequantized if needed."""
    if value is None:
        return None
    if value.const_value is not None:
        return value.const_value.numpy()
    found = codes_of(value)
    return None if found is None else found.numbers


def ints_of(value: ir.Value | None) -> list[int] | None:
    """A constant list of integers."""
    found = array_of(value)
    return None if found is None else [int(item) for item in np.ravel(found)]


def shape_of(value: ir.Value | None) -> tuple[int, ...]:
    """The static shape of a tensor with a batch of one."""
    shape = None if value is None or value.shape is None else list(value.shape)
    if shape is None or not all(isinstance(size, int) for size in shape):
        raise UnsupportedOperator("a shape that isn't static")
    sizes = tuple(int(size) for size in shape)  # type: ignore[arg-type]
    if not 2 <= len(sizes) <= 4 or sizes[0] != 1:
        raise UnsupportedOperator(f"a tensor of shape {list(sizes)} (ncnn supports one sample with 1 to 3 axes)")
    return sizes


def axis_of(axis: int, rank: int) -> int:
    """Convert an axis of ONNX to ncnn, which has no batch axis."""
    axis %= rank
    if axis == 0:
        raise UnsupportedOperator("along the batch")
    return axis - 1


def codes_of(value: ir.Value | None) -> ConstantCodes | None:
    """The constant integers before a DQ, or None."""
    node = None if value is None else value.producer()
    if node is None or node.op_type != "DequantizeLinear":
        return None
    codes, scale = node.inputs[0], node.inputs[1]
    if codes is None or codes.const_value is None or scale is None or scale.const_value is None:
        return None
    site = str(codes.name).removesuffix(".codes")
    if "block_size" in node.attributes:
        raise UnsupportedOperator(f"scales in groups at {site}")
    zero = node.inputs[2] if len(node.inputs) > 2 else None
    if zero is not None and np.any(_constant(zero)):
        raise UnsupportedOperator(f"a zero point at {site}")
    array, scales = codes.const_value.numpy(), scale.const_value.numpy().astype(np.float32)
    axis = node.attributes["axis"].as_int() % array.ndim if scales.ndim and "axis" in node.attributes else None
    return ConstantCodes(site, array, scales, axis)


def rounded(value: ir.Value | None) -> Rounded | None:
    """The Q/DQ pair before a value, or None; raises if ncnn doesn't support its grid."""
    node = None if value is None else value.producer()
    if node is None or node.op_type != "DequantizeLinear":
        return None
    quantize = None if node.inputs[0] is None else node.inputs[0].producer()
    if quantize is None or quantize.op_type != "QuantizeLinear":
        return None
    source, scale, zero = quantize.inputs[:3]
    assert source is not None and scale is not None and zero is not None  # guaranteed by `export`
    site = str(quantize.outputs[0].name).removesuffix(".codes")
    clip = source.producer()
    bounds = [_constant(bound) for bound in clip.inputs[1:3]] if clip is not None and is_redundant_clip(clip) else []
    step = _constant(scale)
    narrow = bool(bounds) and all(abs(abs(float(bound) / float(step)) - _CODES) < 0.1 for bound in bounds)
    if step.size != 1 or np.any(_constant(zero)) or not narrow:
        raise UnsupportedOperator(f"codes other than −127 to 127 around 0 at {site}")
    assert clip is not None and clip.inputs[0] is not None
    return Rounded(clip.inputs[0], site, float(step))


def is_redundant_clip(node: ir.Node) -> bool:
    """Whether it is the clip to −127 … 127 that `export` adds before Q; ncnn's quantization includes it."""
    low = node.inputs[1] if node.op_type == "Clip" and len(node.inputs) == 3 else None
    uses = node.outputs[0].uses()
    return (
        low is not None
        and str(low.name).split("~")[0].endswith(".low")
        and bool(uses)
        and all(use.node.op_type == "QuantizeLinear" for use in uses)
    )


def _constant(value: ir.Value | None) -> NDArray[Any]:
    if value is None or value.const_value is None:
        raise UnsupportedOperator("a grid that isn't constant")
    return value.const_value.numpy()


class _Missing(UnsupportedOperator):
    """An operand that no layer computes."""


class LayerWriter:
    """Collects the layers that conversions of operators add."""

    def __init__(self, graph: ir.Graph, operators: Mapping[str, Callable[[LayerWriter, ir.Node], None]]) -> None:
        self.graph, self.operators = graph, operators
        self.net = Net(layers=[], inputs={}, outputs={}, sites={}, scales={})
        self.blobs: dict[str, str] = {}  # name of a value → its blob
        self.names: dict[str, int] = {}  # used names of blobs
        self.called: dict[str, int] = {}  # used names of layers
        self.problems: dict[str, list[str]] = {}
        self.missing: list[str] = []

    def run(self) -> None:
        """Convert all operators; raises an error that lists unsupported ones."""
        for value in self.graph.inputs:
            self._attempt(value.name or "", self._input, value)
        for node in self.graph:
            if node.op_type not in _SKIPPED and not is_redundant_clip(node):
                self._attempt(str(node.outputs[0].name), self._node, node)
        for value in self.graph.outputs:
            self._attempt(value.name or "", self._output, value)
        if self.missing and not self.problems:  # otherwise they depend on an operator that is already reported
            self.problems["an operand that no layer computes"] = self.missing
        if self.problems:
            raise ExportError(
                "these operators can't be converted to ncnn",
                value="; ".join(f"{what}: {', '.join(dict.fromkeys(names))}" for what, names in self.problems.items()),
                fix="plan for the backend ncnn; for operators that aren't in docs/runtimes.md, use another runtime",
                code="operator-without-translation",
            )

    def _attempt(self, name: str, step: Callable[..., None], *args: object) -> None:
        try:
            step(*args)
        except _Missing:
            self.missing.append(name)
        except UnsupportedOperator as reason:
            self.problems.setdefault(str(reason), []).append(name)

    def _node(self, node: ir.Node) -> None:
        if node.op_type not in self.operators:
            raise UnsupportedOperator(node.op_type)
        if all(value is None or array_of(value) is not None for value in node.inputs):
            raise UnsupportedOperator(f"{node.op_type} of constants")
        self.operators[node.op_type](self, node)

    def add(
        self,
        kind: str,
        node: ir.Node | str,
        reads: Sequence[str],
        parameters: Mapping[int, LayerParameter] | None = None,
        weights: Sequence[LayerWeight] = (),
        *,
        writes: int = 1,
        name: str | None = None,
    ) -> Layer:
        """Add a layer with blobs named after the node's outputs; a string names an intermediate blob."""
        tops = [node] if isinstance(node, str) else [str(value.name) for value in node.outputs[:writes]]
        blobs = [_unique(self.names, _plain(top)) for top in tops]
        called = _unique(self.called, _plain(name or tops[0]))
        layer = Layer(kind, called, list(reads), blobs, dict(parameters or {}), [*weights])
        self.net.layers.append(layer)
        if not isinstance(node, str):
            self.blobs.update(zip(tops, blobs, strict=True))
        return layer

    def alias(self, value: ir.Value, blob: str) -> None:
        """Use an existing blob for this value."""
        self.blobs[str(value.name)] = blob

    def blob(self, value: ir.Value | None, *, rank: int | None = None) -> str:
        """The blob of a value; quantization is added as separate layers."""
        assert value is not None
        if (constant := array_of(value)) is not None:
            return self._memory(value, constant, rank)
        found = rounded(value)
        if found is None:
            if value.name not in self.blobs:
                raise _Missing
            return self.blobs[value.name]
        if found.site not in self.blobs:
            self.blobs[found.site] = self._round(found)
        return self.blobs[found.site]

    def _round(self, found: Rounded) -> str:
        """Quantize, and dequantize with Cast and BinaryOp, because ncnn's Dequantize only reads accumulators."""
        weight = LayerWeight(factor(found.scale).reshape(1), name=f"{found.site}.factor")
        codes = self.add("Quantize", f"{found.site}.codes", [self.blob(found.source)], {0: 1}, [weight])
        self.net.sites.setdefault(found.site, Reading(codes, found.scale))
        wide = self.add("Cast", f"{found.site}.wide", codes.writes, {0: 3, 1: 1})
        return self.add("BinaryOp", found.site, wide.writes, {0: 2, 1: 1, 2: found.scale}).writes[0]

    def _memory(self, value: ir.Value, array: NDArray[np.generic], rank: int | None) -> str:
        """A constant as a blob, without the batch axis."""
        shape = array.shape
        if rank is not None:
            shape = (1,) * (rank - len(shape)) + shape
        if len(shape) not in (2, 3, 4) or shape[0] != 1 or array.dtype.kind != "f":
            raise UnsupportedOperator(f"a constant of shape {list(array.shape)}, type {array.dtype}")
        sizes = dict(zip((0, 1, 2), reversed(shape[1:]), strict=False))
        return self.add("MemoryData", str(value.name), [], sizes, [LayerWeight(array.astype(np.float32))]).writes[0]

    def _input(self, value: ir.Value) -> None:
        if value.dtype != ir.DataType.FLOAT:
            raise UnsupportedOperator("an input that isn't float32")
        shape = shape_of(value)[1:]
        sizes = dict(zip((0, 1, 2), reversed(shape), strict=False))
        self.blobs[str(value.name)] = self.add("Input", str(value.name), [], sizes).writes[0]
        self.net.inputs[str(value.name)] = shape

    def _output(self, value: ir.Value) -> None:
        self.net.outputs[str(value.name)] = (self.blob(value), shape_of(value)[1:])


def _unique(names: dict[str, int], name: str) -> str:
    count = names.get(name, 0)
    names[name] = count + 1
    return f"{name}~{count}" if count else name


def _plain(name: str) -> str:
    """Remove spaces, which separate fields in ncnn's files, and limit the length (ncnn reads at most 255 bytes)."""
    return "_".join(name.split())[-200:]
