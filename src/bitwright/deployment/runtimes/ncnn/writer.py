"""Convert ONNX to ncnn's layers: operator by operator, then fused as ncnn executes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes
from numpy.typing import NDArray

from bitwright.core.errors import ExportError
from bitwright.deployment.runtimes.ncnn.layers import (
    ACTIVATION,
    ACTIVATION_PARAMETERS,
    INT8,
    PRODUCTS,
    REQUANTIZES,
    Layer,
    LayerParameter,
    LayerWeight,
    Net,
    Reading,
    factor,
)
from bitwright.deployment.runtimes.ncnn.onnx_graph import (
    Rounded,
    UnsupportedOperator,
    array_of,
    is_redundant_clip,
    rounded,
    shape_of,
)
from bitwright.deployment.runtimes.ncnn.operators import OPERATORS

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


_SKIPPED = ("QuantizeLinear", "DequantizeLinear", "Constant")  # handled by their readers


def convert(model: ir.Model) -> Net:
    """The layers of an ONNX model with a batch of one; one error lists all unsupported operators."""
    passes.ShapeInferencePass()(model)
    writer = LayerWriter(model.graph)
    writer.run()
    return fuse(writer.net)


class _Missing(UnsupportedOperator):
    """An operand that no layer computes."""


class LayerWriter:
    """Collects the layers that conversions of operators add."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
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
        if node.op_type not in OPERATORS:
            raise UnsupportedOperator(node.op_type)
        if all(value is None or array_of(value) is not None for value in node.inputs):
            raise UnsupportedOperator(f"{node.op_type} of constants")
        OPERATORS[node.op_type](self, node)

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
