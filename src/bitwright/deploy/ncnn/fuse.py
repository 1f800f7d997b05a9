"""What ncnn's layers do in one go: padding before, activation and rounding behind; and a Split where paths part."""

from __future__ import annotations

from bitwright.deploy.ncnn.layers import (
    ACTIVATION,
    ACTIVATION_PARAMETERS,
    INT8,
    PRODUCTS,
    REQUANTIZES,
    Layer,
    Net,
    Parameter,
    Weight,
)

_CONVOLUTIONS = ("Convolution", "ConvolutionDepthWise")
_AROUND = (4, 15, 14, 16)  # a convolution's left, right, top, bottom


def fuse(net: Net) -> Net:
    """In place."""
    _drop_unread(net)
    _fuse_padding(net)
    _fuse_activations(net)
    _fuse_rounding(net)
    _split(net)
    return net


def _outputs(net: Net) -> set[str]:
    return {blob for blob, _ in net.outputs.values()}


def _drop_unread(net: Net) -> None:
    """Layers that nobody reads; the inputs stay, since they are given."""
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
    """Zeros around a picture before one convolution are that convolution's own padding: 0 is code 0."""
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


def _whole(parameter: Parameter) -> int:
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
    """A convolution whose readers all are integer convolutions with one grid hands on codes: no float in between."""
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
        layer.weights.append(Weight(factors[0].array))


def _split(net: Net) -> None:
    """ncnn gives each blob to one reader; an output that is read as well is one more."""
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
