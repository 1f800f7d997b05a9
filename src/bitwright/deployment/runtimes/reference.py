"""`reference`: executes a Q/DQ model with integers only, in NumPy, like a target without floats.

A value is an array of integers with a scale (`Integers`). `OPERATORS` has the implementations of ONNX operators.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from bitwright.core.errors import ArtefactError
from bitwright.deployment.runtimes.base import OnnxReader, input_error

IntegerArray = NDArray[np.int64]
_ROOM = 62  # bits of an int64 available for a product
_FINE = 44  # bits available for values on a common scale, which leaves 18 for the next multiplier


@dataclass(frozen=True, eq=False, kw_only=True)
class Integers:
    """Real numbers (codes − zero_point)·scale; scale and zero point broadcast to the codes.

    Accumulators, which aren't rounded to a grid yet, use the same class with zero point 0.
    """

    codes: IntegerArray
    scale: NDArray[np.float64]
    zero_point: IntegerArray
    bits: int = 32
    stored: Any = None
    """The type of the codes if they are the result themselves (the output of QuantizeLinear)."""

    @property
    def centred(self) -> IntegerArray:
        """The codes minus the zero point."""
        return self.codes - self.zero_point

    def real(self) -> NDArray[np.float32]:
        """The values of the codes."""
        return (self.centred * self.scale).astype(np.float32)


def accumulator(codes: IntegerArray, scale: Any) -> Integers:
    """Integers with zero point 0."""
    return Integers(codes=codes, scale=np.asarray(scale, np.float64), zero_point=np.zeros((), np.int64))


def bit_length(codes: IntegerArray) -> int:
    """The number of bits of the largest magnitude."""
    return int(np.abs(codes).max(initial=0)).bit_length()


def rescale(codes: IntegerArray, ratio: NDArray[np.float64]) -> IntegerArray:
    """round(codes·ratio), ties to even, with the ratio as an integer multiplier and a shift."""
    mantissa, exponent = np.frexp(ratio)
    width = min(31, _ROOM - bit_length(codes))
    multiplier = np.rint(np.ldexp(mantissa, width)).astype(np.int64)
    shift = (width - exponent).astype(np.int64)
    product = codes * multiplier
    left, right = np.maximum(-shift, 0), np.clip(shift, 0, _ROOM)
    floor = product >> right
    rest, half = product - (floor << right), np.where(right > 0, np.int64(1) << np.maximum(right - 1, 0), 1)
    up = (rest > half) | ((rest == half) & (floor & 1 == 1) & (right > 0))
    result: IntegerArray = (floor + up) << left
    return result


def requantize(x: Integers, scale: NDArray[np.float64], zero_point: IntegerArray, low: int, high: int) -> IntegerArray:
    """The codes of x on another grid."""
    codes: IntegerArray = np.clip(rescale(x.centred, x.scale / scale) + zero_point, low, high)
    return codes


def common(values: list[Integers]) -> tuple[list[IntegerArray], float]:
    """The values on a common scale, finer than the coarsest one, so that they can be added and compared."""
    coarsest = max(float(value.scale.max()) for value in values)
    centred = [value.centred for value in values]
    if all((value.scale == coarsest).all() for value in values):
        return centred, coarsest
    extra = max(0, min(24, _FINE - max(bit_length(codes) for codes in centred)))
    target = float(np.ldexp(coarsest, -extra))
    return [rescale(codes, value.scale / target) for codes, value in zip(centred, values, strict=True)], target


def uniform(x: Integers) -> Integers:
    """The same values with a single scale, for operators that move values between channels."""
    if x.scale.size == 1:
        return replace(x, scale=x.scale.reshape(()), zero_point=x.zero_point.reshape(()))
    (codes,), scale = common([x])
    return accumulator(codes, scale)


def finer(x: Integers) -> Integers:
    """The same values with a finer scale, for bounds between codes."""
    extra = max(0, min(24, _FINE - bit_length(x.centred)))
    return accumulator(x.centred << extra, np.ldexp(x.scale, -extra))


def fixed_point(constant: NDArray[Any]) -> Integers:
    """A float constant with 24 bits."""
    largest = float(np.abs(constant).max(initial=0)) or 1.0
    scale = largest / 2**24
    return accumulator(np.rint(constant.astype(np.float64) / scale).astype(np.int64), scale)


def padded(x: IntegerArray, pads: Sequence[int], fill: int) -> IntegerArray:
    """`x` with ONNX's pads (all begins, then all ends) around its last axes; negative pads crop."""
    rank = len(pads) // 2
    begins, ends = list(pads[:rank]), list(pads[rank:])
    crop: list[Any] = [
        slice(max(-b, 0), size - max(-e, 0)) for b, e, size in zip(begins, ends, x.shape[-rank:], strict=True)
    ]
    x = x[..., *crop]
    width = [(0, 0)] * (x.ndim - rank) + [(max(b, 0), max(e, 0)) for b, e in zip(begins, ends, strict=True)]
    return np.pad(x, width, constant_values=fill)


def windows(x: IntegerArray, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]) -> IntegerArray:
    """The values in each window of the kernel: (N, C, *out, *kernel)."""
    rank = len(kernel)
    span = [d * (k - 1) + 1 for k, d in zip(kernel, dilations, strict=True)]
    view = np.lib.stride_tricks.sliding_window_view(x, span, axis=tuple(range(-rank, 0)))
    steps: list[Any] = [slice(None, None, step) for step in (*strides, *dilations)]
    found: IntegerArray = view[..., *steps]
    return found


def conv(
    x: IntegerArray, weight: IntegerArray, *, strides: Sequence[int], dilations: Sequence[int], group: int
) -> IntegerArray:
    """A convolution of the padded `x` (N, C, *space) with `weight` (O, C/group, *kernel)."""
    rank = weight.ndim - 2
    seen = windows(x, weight.shape[2:], strides, dilations)
    batch, channels, out = seen.shape[0], seen.shape[1], seen.shape[2 : 2 + rank]
    # (N, group, positions, C/group · kernel) × (group, C/group · kernel, O/group)
    seen = seen.reshape(batch, group, channels // group, *seen.shape[2:])
    seen = np.moveaxis(seen, 2, 2 + rank).reshape(batch, group, int(np.prod(out)), -1)
    matrix = weight.reshape(group, weight.shape[0] // group, -1).transpose(0, 2, 1)
    sums: IntegerArray = (seen @ matrix).transpose(0, 1, 3, 2)
    return sums.reshape(batch, weight.shape[0], *out)


def conv_transpose(
    x: IntegerArray,
    weight: IntegerArray,
    *,
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int],
    group: int,
    output_padding: Sequence[int],
) -> IntegerArray:
    """A transposed convolution: insert zeros between inputs, then convolve with the flipped kernel."""
    rank = weight.ndim - 2
    spread = np.zeros(
        (*x.shape[:2], *(s * (n - 1) + 1 for n, s in zip(x.shape[2:], strides, strict=True))), dtype=np.int64
    )
    steps: list[Any] = [slice(None, None, step) for step in strides]
    spread[..., *steps] = x
    reach = [d * (k - 1) for k, d in zip(weight.shape[2:], dilations, strict=True)]
    begins = [r - p for r, p in zip(reach, pads[:rank], strict=True)]
    ends = [r - p + o for r, p, o in zip(reach, pads[rank:], output_padding, strict=True)]
    # (C, O/group, *kernel) → (O, C/group, *kernel)
    turned = weight.reshape(group, weight.shape[0] // group, *weight.shape[1:]).swapaxes(1, 2)
    turned = np.flip(turned.reshape(-1, *turned.shape[2:]), tuple(range(-rank, 0)))
    return conv(padded(spread, [*begins, *ends], 0), turned, strides=[1] * rank, dilations=dilations, group=group)


Value = Integers | NDArray[Any] | None
Attributes = dict[str, Any]

# These operators only move values, so they can run on codes.
MOVES = frozenset(
    "Reshape Flatten Transpose Squeeze Unsqueeze Identity Slice Gather Split Expand Tile DepthToSpace".split()  # noqa: SIM905
)


def _code(value: Value) -> TypeGuard[Integers]:
    """Whether a value can be multiplied. Accumulators can't: without rounding, the product runs in float."""
    return isinstance(value, Integers) and value.bits <= 16


def _spatial(attributes: Attributes, rank: int) -> dict[str, Any]:
    if attributes.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID"):
        what, value = "the reference executor requires explicit pads", attributes["auto_pad"]
        raise ArtefactError(what, value=value, code="operator-without-translation")
    return {
        "strides": attributes.get("strides", [1] * rank),
        "pads": attributes.get("pads", [0] * 2 * rank),
        "dilations": attributes.get("dilations", [1] * rank),
    }


def _sums(codes: IntegerArray, x: Integers, weight: Integers) -> IntegerArray:
    """Check that sums of 8-bit products fit into int32, which all targets use as accumulator."""
    if x.bits <= 8 and weight.bits <= 8 and bit_length(codes) > 31:
        what, value = "an int32 accumulator overflows", int(np.abs(codes).max())
        raise ArtefactError(what, value=value, fix="use smaller weights", code="accumulator-overflow")
    return codes


def _with_bias(sums: IntegerArray, scale: NDArray[np.float64], bias: Value, shape: tuple[int, ...]) -> Integers:
    if bias is None:
        return accumulator(sums, scale)
    if isinstance(bias, Integers):  # int32, on the accumulator's grid
        return accumulator(sums + bias.centred.reshape(shape), scale)
    spread = bias.astype(np.float64).reshape(shape)
    return accumulator(sums + np.rint(spread / scale).astype(np.int64), scale)


def _conv(attributes: Attributes, x: Value, weight: Value, bias: Value = None) -> Integers | None:
    if not _code(x) or not _code(weight):
        return None
    rank = weight.codes.ndim - 2
    x, space = uniform(x), _spatial(attributes, rank)
    sums = conv(padded(x.centred, space.pop("pads"), 0), weight.centred, group=attributes.get("group", 1), **space)
    scale = x.scale * weight.scale.reshape(-1, *[1] * rank) if weight.scale.ndim else x.scale * weight.scale
    return _with_bias(_sums(sums, x, weight), scale, bias, (-1, *[1] * rank))


def _conv_transpose(attributes: Attributes, x: Value, weight: Value, bias: Value = None) -> Integers | None:
    if not _code(x) or not _code(weight):
        return None
    rank, group = weight.codes.ndim - 2, attributes.get("group", 1)
    x = uniform(x)
    more = attributes.get("output_padding", [0] * rank)
    sums = conv_transpose(x.centred, weight.centred, group=group, output_padding=more, **_spatial(attributes, rank))
    scale = x.scale * weight.scale
    if weight.scale.ndim:  # one per index of the second axis, equal in all groups
        scale = np.tile(scale.reshape(-1), group).reshape(-1, *[1] * rank)
    return _with_bias(_sums(sums, x, weight), scale, bias, (-1, *[1] * rank))


def _matmul(attributes: Attributes, a: Value, b: Value) -> Integers | None:
    if not _code(a) or not _code(b):
        return None
    a = uniform(a)
    if b.scale.ndim > 1 and b.scale.shape[-2] > 1:  # scales along the summed axis
        b = uniform(b)
    return accumulator(
        _sums(a.centred @ b.centred, a, b), a.scale * (b.scale if b.scale.size > 1 else b.scale.reshape(()))
    )


def _gemm(attributes: Attributes, a: Value, b: Value, bias: Value = None) -> Integers | None:
    plain = attributes.get("alpha", 1.0) == attributes.get("beta", 1.0) == 1.0 and not attributes.get("transA", 0)
    if not plain or not _code(a) or not _code(b):
        return None
    a = uniform(a)
    turned = b.centred.T if attributes.get("transB", 0) else b.centred
    return _with_bias(
        _sums(a.centred @ turned, a, b), a.scale * b.scale.reshape(-1 if b.scale.size > 1 else ()), bias, (-1,)
    )


def _add(attributes: Attributes, *values: Value) -> Integers | None:
    parts = [value for value in values if isinstance(value, Integers)]
    if len(parts) < len(values):
        return None
    codes, scale = common(parts)
    return accumulator(codes[0] + codes[1], scale)


def _mul(attributes: Attributes, a: Value, b: Value) -> Integers | None:
    if not _code(a) or not _code(b):
        return None
    return accumulator(a.centred * b.centred, a.scale * b.scale)


def _concat(attributes: Attributes, *values: Value) -> Integers | None:
    parts = [value for value in values if isinstance(value, Integers)]
    if len(parts) < len(values):
        return None
    codes, scale = common(parts)
    return accumulator(np.concatenate(codes, axis=attributes["axis"]), scale)


def _relu(attributes: Attributes, x: Value) -> Integers | None:
    return replace(x, codes=np.maximum(x.codes, x.zero_point)) if isinstance(x, Integers) else None


def _clip(attributes: Attributes, x: Value, low: Value = None, high: Value = None) -> Integers | None:
    if not isinstance(x, Integers) or isinstance(low, Integers) or isinstance(high, Integers):
        return None
    x = finer(x)
    codes = x.codes
    if low is not None:
        codes = np.maximum(codes, np.rint(low.astype(np.float64) / x.scale).astype(np.int64))
    if high is not None:
        codes = np.minimum(codes, np.rint(high.astype(np.float64) / x.scale).astype(np.int64))
    return replace(x, codes=codes)


def _window_pads(attributes: Attributes, size: tuple[int, ...]) -> tuple[list[int], dict[str, Any]]:
    """ONNX's pads, with additional padding at the ends for windows that exceed the input (ceil_mode)."""
    kernel = attributes["kernel_shape"]
    space = _spatial(attributes, len(kernel))
    pads: list[int] = list(space.pop("pads"))
    if attributes.get("ceil_mode", 0):
        for i, (k, n) in enumerate(zip(kernel, size, strict=True)):
            step, span = space["strides"][i], space["dilations"][i] * (k - 1) + 1
            count = -(-(n + pads[i] + pads[i + len(kernel)] - span) // step) + 1
            if (count - 1) * step >= n + pads[i]:  # a window must start inside the input or its leading padding
                count -= 1
            pads[i + len(kernel)] += max(0, (count - 1) * step + span - n - pads[i] - pads[i + len(kernel)])
    return pads, space


def _max_pool(attributes: Attributes, x: Value) -> Integers | None:
    if not isinstance(x, Integers):
        return None
    rank = len(attributes["kernel_shape"])
    pads, space = _window_pads(attributes, x.codes.shape[-rank:])
    lowest = int(np.iinfo(np.int64).min)
    seen = windows(padded(x.codes, pads, lowest), attributes["kernel_shape"], **space)
    return replace(x, codes=seen.max(tuple(range(-rank, 0))))


def _average_pool(attributes: Attributes, x: Value) -> Integers | None:
    if not isinstance(x, Integers):
        return None
    kernel = attributes["kernel_shape"]
    axes = tuple(range(-len(kernel), 0))
    size = x.codes.shape[-len(kernel) :]
    pads, space = _window_pads(attributes, size)
    sums = windows(padded(x.centred, pads, 0), kernel, **space).sum(axes)
    counted = np.ones((1, 1, *size), np.int64)
    if attributes.get("count_include_pad", 0):
        own = list(attributes.get("pads", [0] * 2 * len(kernel)))
        counted = padded(padded(counted, own, 1), [a - b for a, b in zip(pads, own, strict=True)], 0)
    else:
        counted = padded(counted, pads, 0)
    counts = windows(counted, kernel, **space).sum(axes)
    if (counts == counts.max()).all():
        return accumulator(sums, x.scale / counts.max())
    fine = finer(accumulator(sums, x.scale))
    return accumulator(rescale(fine.codes, 1.0 / counts), fine.scale)


def _global_average_pool(attributes: Attributes, x: Value) -> Integers | None:
    if not isinstance(x, Integers):
        return None
    axes = tuple(range(2, x.codes.ndim))
    count = int(np.prod(x.codes.shape[2:]))
    return accumulator(x.centred.sum(axes, keepdims=True), x.scale / count)


def _reduce_mean(attributes: Attributes, x: Value, axes: Value = None) -> Integers | None:
    if not isinstance(x, Integers) or isinstance(axes, Integers) or axes is None:
        return None
    x = uniform(x)
    along = tuple(int(axis) for axis in axes)
    count = int(np.prod([x.codes.shape[axis] for axis in along]))
    return accumulator(x.centred.sum(along, keepdims=bool(attributes.get("keepdims", 1))), x.scale / count)


def _pad(attributes: Attributes, x: Value, pads: Value, fill: Value = None, axes: Value = None) -> Integers | None:
    constant = attributes.get("mode", b"constant") == b"constant" and (fill is None or not np.any(fill))  # type: ignore[arg-type]
    if not isinstance(x, Integers) or not isinstance(pads, np.ndarray) or not constant or axes is not None:
        return None
    x = uniform(x)
    return replace(x, codes=padded(x.codes, [int(pad) for pad in pads], int(x.zero_point)))


OPERATORS: dict[str, Callable[..., Integers | None]] = {
    "Add": _add,
    "AveragePool": _average_pool,
    "Clip": _clip,
    "Concat": _concat,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Gemm": _gemm,
    "GlobalAveragePool": _global_average_pool,
    "MatMul": _matmul,
    "MaxPool": _max_pool,
    "Mul": _mul,
    "Pad": _pad,
    "ReduceMean": _reduce_mean,
    "Relu": _relu,
}


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
