"""Read constants, shapes and Q/DQ pairs of an exported ONNX graph in ncnn's terms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

_CODES = 127


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
