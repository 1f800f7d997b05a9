"""ncnn's layers, each a line of the .param file and a part of the .bin file, and their fusion."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
