"""Convert an ONNX graph to ncnn's layers: read its constants, shapes and Q/DQ pairs; collect and fuse the layers.

A layer is a line of the .param file and a part of the .bin file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.core.errors import ExportError

MAGIC = 7767517
# Tags before a weight in the .bin file, which determine its type.
_INT8_TAG = 0x000D4B38
_FLOAT_TAG = 0

# Ids of parameters shared by several kinds of layers.
INT8, ACTIVATION, ACTIVATION_PARAMETERS = 8, 9, 10
PRODUCTS = ("Convolution", "ConvolutionDepthWise", "InnerProduct")
REQUANTIZES = 100  # added to INT8 if the layer also quantizes its output

LayerParameter = int | float | tuple[int, ...] | tuple[float, ...]


@dataclass(frozen=True, eq=False)
class LayerWeight:
    """An array in the .bin file. The main weight of a layer is `tagged`; biases and factors are plain floats."""

    array: NDArray[Any]
    tagged: bool = False
    name: str | None = None
    """The name for lookups: `<site>.codes`, `<site>.value`, `<site>.factor`."""

    def data(self) -> bytes:
        """The bytes, padded to whole words."""
        raw = np.ascontiguousarray(self.array).tobytes()
        return raw + bytes(-len(raw) % 4)

    def head(self) -> bytes:
        """The tag bytes."""
        if not self.tagged:
            return b""
        return (_INT8_TAG if self.array.dtype == np.int8 else _FLOAT_TAG).to_bytes(4, "little")


@dataclass(eq=False)
class Layer:
    """One layer; its inputs and outputs are names of blobs."""

    kind: str
    name: str
    reads: list[str]
    writes: list[str]
    parameters: dict[int, LayerParameter] = field(default_factory=dict)
    weights: list[LayerWeight] = field(default_factory=list)

    @property
    def integer(self) -> bool:
        """Whether it multiplies integers."""
        return self._int8 > 0

    @property
    def rounds(self) -> bool:
        """Whether its output is codes."""
        return self._int8 > REQUANTIZES

    @property
    def _int8(self) -> int:
        found = self.parameters.get(INT8, 0)
        return found if self.kind in PRODUCTS and isinstance(found, int) else 0

    def line(self) -> str:
        """The line in the .param file."""
        parts = [self.kind, self.name, str(len(self.reads)), str(len(self.writes)), *self.reads, *self.writes]
        return " ".join([*parts, *(_text(number, value) for number, value in sorted(self.parameters.items()))])


@dataclass
class Reading:
    """A site that a layer quantizes itself: the layer, and the zero padding it applies first."""

    layer: Layer
    scale: float
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Left, right, top, bottom."""


@dataclass
class Net:
    """Layers in order, and the inputs, outputs and sites of the model."""

    layers: list[Layer]
    inputs: dict[str, tuple[int, ...]]
    """The shape of one sample of each input."""
    outputs: dict[str, tuple[str, tuple[int, ...]]]
    """Output name → blob and shape of one sample."""
    sites: dict[str, Reading]
    scales: dict[str, NDArray[np.float32]]
    """Scales of weights, by site; the layers store their reciprocals."""

    def readers(self) -> dict[str, list[Layer]]:
        """The layers that read each blob; a layer that reads one twice is listed twice."""
        found: dict[str, list[Layer]] = {}
        for layer in self.layers:
            for blob in layer.reads:
                found.setdefault(blob, []).append(layer)
        return found

    def param(self) -> str:
        """The contents of the .param file."""
        blobs = sum(len(layer.writes) for layer in self.layers)
        return "".join(f"{line}\n" for line in (MAGIC, f"{len(self.layers)} {blobs}", *(y.line() for y in self.layers)))

    def weights(self) -> Iterator[LayerWeight]:
        """All weights, in the order of the .bin file."""
        for layer in self.layers:
            yield from layer.weights


def factor(scale: NDArray[Any] | float) -> NDArray[np.float32]:
    """The factor by which ncnn multiplies to get codes."""
    return (1 / np.asarray(scale, np.float64)).astype(np.float32)


def _text(number: int, value: LayerParameter) -> str:
    if isinstance(value, tuple):  # lists have other ids
        return f"{-23300 - number}={','.join([str(len(value)), *map(_number, value)])}"
    return f"{number}={_number(value)}"


def _number(value: int | float) -> str:
    """Floats have a point or exponent, which distinguishes them from integers."""
    return f"{np.float32(value):.9e}" if isinstance(value, float) else str(value)


_CONVOLUTIONS = ("Convolution", "ConvolutionDepthWise")
_AROUND = (4, 15, 14, 16)  # a convolution's left, right, top, bottom


def fuse(net: Net) -> Net:
    """Fuse layers, in place."""
    _drop_unread(net)
    _fuse_padding(net)
    _fuse_activations(net)
    _fuse_rounding(net)
    _split(net)
    return net


def _outputs(net: Net) -> set[str]:
    return {blob for blob, _ in net.outputs.values()}


def _drop_unread(net: Net) -> None:
    """Remove layers without readers, except inputs."""
    wanted = _outputs(net)
    kept: list[Layer] = []
    for layer in reversed(net.layers):
        if layer.kind == "Input" or wanted & set(layer.writes):
            kept.append(layer)
            wanted |= set(layer.reads)
    net.layers = kept[::-1]
    net.sites = {site: what for site, what in net.sites.items() if what.layer in net.layers}


def _only_reader(net: Net, blob: str) -> Layer | None:
    readers = net.readers().get(blob, [])
    return readers[0] if len(readers) == 1 and blob not in _outputs(net) else None


def _fuse_padding(net: Net) -> None:
    """Move zero padding of an image into the only convolution that reads it: 0 is code 0."""
    for layer in list(net.layers):
        reader = _only_reader(net, layer.writes[0]) if layer.kind == "Padding" else None
        top, bottom, left, right, mode, fill, front, behind = (layer.parameters.get(i, 0) for i in (*range(6), 7, 8))
        if reader is None or reader.kind not in _CONVOLUTIONS or any((mode, fill, front, behind)):
            continue
        pads = (left, right, top, bottom)
        for number, pad in zip(_AROUND, pads, strict=True):
            reader.parameters[number] = _whole(reader.parameters[number]) + _whole(pad)
        reader.reads = list(layer.reads)
        net.layers.remove(layer)
        for what in net.sites.values():
            if what.layer is reader:
                what.pads = (_whole(left), _whole(right), _whole(top), _whole(bottom))


def _whole(parameter: LayerParameter) -> int:
    assert isinstance(parameter, int)
    return parameter


def _fuse_activations(net: Net) -> None:
    for layer in list(net.layers):
        reader = _only_reader(net, layer.writes[0]) if layer.kind in PRODUCTS else None
        if reader is None:
            continue
        if reader.kind == "ReLU" and not reader.parameters.get(0, 0):
            layer.parameters[ACTIVATION] = 1
        elif reader.kind == "Clip":
            low, high = reader.parameters[0], reader.parameters[1]
            assert isinstance(low, float) and isinstance(high, float)
            layer.parameters[ACTIVATION] = 3
            layer.parameters[ACTIVATION_PARAMETERS] = (low, high)
        else:
            continue
        layer.writes = list(reader.writes)
        net.layers.remove(reader)


def _fuse_rounding(net: Net) -> None:
    """Let a convolution output codes if all its readers are integer convolutions with the same grid."""
    readers, outputs = net.readers(), _outputs(net)
    for layer in net.layers:
        behind = readers.get(layer.writes[0], [])
        if layer.kind not in _CONVOLUTIONS or not layer.integer or layer.writes[0] in outputs or not behind:
            continue
        if not all(reader.kind in _CONVOLUTIONS and reader.integer for reader in behind):
            continue
        factors = [reader.weights[-1 - reader.rounds] for reader in behind]
        if any(other.array.item() != factors[0].array.item() for other in factors):
            continue
        layer.parameters[INT8] = _whole(layer.parameters[INT8]) + REQUANTIZES
        layer.weights.append(LayerWeight(factors[0].array))


def _split(net: Net) -> None:
    """Add Split layers: each blob in ncnn has one reader, and an output counts as a reader."""
    readers, outputs = net.readers(), _outputs(net)
    layers: list[Layer] = []
    for layer in net.layers:
        layers.append(layer)
        for blob in layer.writes:
            behind = readers.get(blob, [])
            count = len(behind) + (blob in outputs)
            if count < 2:
                continue
            parts = [f"{blob}~{index}~" for index in range(count)]
            layers.append(Layer("Split", f"{blob}~split", [blob], parts))
            for reader, part in zip(behind, parts, strict=False):
                reader.reads[reader.reads.index(blob)] = part
            if blob in outputs:
                for name, (source, shape) in net.outputs.items():
                    if source == blob:
                        net.outputs[name] = (parts[-1], shape)
    net.layers = layers


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
