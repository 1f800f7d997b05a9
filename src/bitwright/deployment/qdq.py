"""Replace markers in an ONNX graph by QuantizeLinear/DequantizeLinear pairs, and store weights as integers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes
import torch
from numpy.typing import NDArray
from torch import Tensor

from bitwright.core.errors import ExportError, PlanError, Problem
from bitwright.core.formats import Format
from bitwright.deployment.dynamic_onnx import DynamicWriter
from bitwright.quantizers import Attachment, Quantizer
from bitwright.quantizers.grid import holds as guard_holds
from bitwright.quantizers.grid import product_problem

MARKER = ("bitwright", "Site")

_PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul", "Mul")
# storage type of codes: the narrowest ONNX type that contains them
_TYPES: dict[tuple[bool, int], ir.DataType] = {
    (True, 4): ir.DataType.INT4,
    (False, 4): ir.DataType.UINT4,
    (True, 8): ir.DataType.INT8,
    (False, 8): ir.DataType.UINT8,
    (True, 16): ir.DataType.INT16,
    (False, 16): ir.DataType.UINT16,
    (True, 32): ir.DataType.INT32,
}
OPSET = 21
_MOVING = ("MaxPool", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice")  # they keep the codes of their input
_OPSET_21 = {ir.DataType.INT4, ir.DataType.UINT4, ir.DataType.INT16, ir.DataType.UINT16}  # types of codes since 21
_NUMPY = {
    ir.DataType.INT4: ml_dtypes.int4,
    ir.DataType.UINT4: ml_dtypes.uint4,
    ir.DataType.INT8: np.int8,
    ir.DataType.UINT8: np.uint8,
    ir.DataType.INT16: np.int16,
    ir.DataType.UINT16: np.uint16,
    ir.DataType.INT32: np.int32,
}


@dataclass
class Recorded:
    """Facts from one real forward pass: weight codes, folded constants, and the quantizers that ran."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    """The rounded weights instead of their codes, for artefacts in float."""
    constants: dict[str, Tensor] = field(default_factory=dict)
    passed: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    """How often each site was reached, by dtype and rank of the tensor."""


@dataclass
class Counts:
    """The number of quantized tensors in the artefact."""

    activations: int = 0
    dynamic: int = 0
    weights: int = 0
    biases: int = 0


def storage_type(quantizer: Quantizer) -> ir.DataType:
    """The ONNX type of a quantizer's codes: 2 and 3 bits are stored in 4, 5 to 7 in 8, 9 to 15 in 16."""
    signed = quantizer.qmin < 0
    for bits in (4, 8, 16, 32):
        low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
        if low <= quantizer.qmin and quantizer.qmax <= high:
            # no runtime has 4-bit kernels for activations, so their codes are stored in 8-bit types
            return _TYPES[signed, bits if quantizer.weight or bits > 4 else 8]
    what = "no ONNX type can store these codes"
    raise ExportError(what, where=quantizer.site, value=str(quantizer.format), code="unsupported-format")


def fills_type(quantizer: Quantizer) -> bool:
    """Whether saturation to the storage type clips exactly at this quantizer's codes."""
    signed, bits = next(key for key, kind in _TYPES.items() if kind == storage_type(quantizer))
    full = Format(name="", bits=bits, signed=signed)
    return (full.qmin, full.qmax) == (quantizer.qmin, quantizer.qmax)


def write_qdq(model: ir.Model, attachment: Attachment, recorded: Recorded) -> Counts:
    """Replace all markers, in place."""
    writer = _QdqWriter(model, attachment, recorded)
    writer.run()
    _fold_weight_transposes(model)
    _flatten_matrices(model)
    passes.RemoveUnusedNodesPass()(model)
    passes.RemoveUnusedOpsetsPass()(model)
    writer.check()
    _check_products(model)
    if writer.dynamic.values:
        writer.dynamic.use_integers()
        passes.RemoveUnusedNodesPass()(model)
    _keep_signed_codes(model)
    return writer.counts


def _keep_signed_codes(model: ir.Model) -> None:
    """Make sure that ONNX Runtime loads models in which a signed site is moved to an operator in float.

    On x86, ONNX Runtime changes signed codes to unsigned ones, and inserts quantizers behind operators such as MaxPool
    and Reshape. In opset 21 these have the attribute `output_dtype`, which then contradicts the new type: loading
    fails. Opset 20 has no such attribute. Models that need opset 21 get the quantizers here, without the attribute.
    """
    signed = [node for node in model.graph if node.op_type == "DequantizeLinear" and _is_signed_activation(node)]
    if not signed or model.opset_imports.get("") != OPSET:
        return
    if _fits_opset_20(model):
        model.opset_imports[""] = 20
        return
    while signed:
        dequantize = signed.pop()
        for node, index in tuple(dequantize.outputs[0].uses()):
            if index == 0 and not node.domain and node.op_type in _MOVING:
                signed += _quantize_behind(model.graph, dequantize, node)


def _is_signed_activation(node: ir.Node) -> bool:
    codes, zero_point = node.inputs[0], node.inputs[2] if len(node.inputs) > 2 else None
    producer = codes.producer() if codes is not None else None
    constant = zero_point.const_value if zero_point is not None else None
    return (
        producer is not None
        and producer.op_type == "QuantizeLinear"
        and (constant is not None and constant.dtype == ir.DataType.INT8)
    )


def _fits_opset_20(model: ir.Model) -> bool:
    """Whether opset 20 has all operators and types of the model with the same meaning."""
    if model.functions:
        return False
    constants = [value.const_value for value in model.graph.initializers.values()]
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.op_type == "GroupNormalization" or {"block_size", "output_dtype"} & set(node.attributes):
            return False
        constants += [one.value for one in node.attributes.values() if isinstance(one.value, ir.TensorProtocol)]
        if any(one.name in ("to", "dtype") and one.value in _OPSET_21 for one in node.attributes.values()):
            return False
    return not any(constant is not None and constant.dtype in _OPSET_21 for constant in constants)


def _quantize_behind(graph: ir.Graph, dequantize: ir.Node, node: ir.Node) -> list[ir.Node]:
    """Quantize the output of a node whose values lie on the grid of its input, for its users in float."""
    output, parameters = node.outputs[0], dequantize.inputs[1:]
    users = [(user, index) for user, index in output.uses() if user.op_type != "QuantizeLinear"]
    if not users:
        return []
    quantize = ir.node("QuantizeLinear", [output, *parameters])
    behind = ir.node("DequantizeLinear", [quantize.outputs[0], *parameters])
    quantize.outputs[0].name, behind.outputs[0].name = f"{output.name}.moved_codes", f"{output.name}.moved"
    graph.insert_after(node, [quantize, behind])
    for user, index in users:
        user.replace_input_with(index, behind.outputs[0])
    return [behind]


def _float32(tensor: Tensor) -> NDArray[np.generic]:
    array: NDArray[np.generic] = tensor.detach().to(torch.float32).cpu().numpy()
    return array


class _QdqWriter:
    def __init__(self, model: ir.Model, attachment: Attachment, recorded: Recorded) -> None:
        self.model = model
        self.graph = model.graph
        self.attachment = attachment
        self.recorded = recorded
        self.counts = Counts()
        self.made: dict[tuple[str, str], ir.Value] = {}  # (input value or "weight", quantizer) → DQ output
        self.names: dict[str, int] = {}
        self.parameters: dict[str, tuple[ir.Value, ir.Value]] = {}
        self.dynamic = DynamicWriter(self.graph, self._initializer, self._unique)

    def run(self) -> None:
        for node in list(self.graph):
            if (node.domain, node.op_type) == MARKER:
                site = node.attributes["site"].as_string()
                replacement = self._replacement(node, site)
                output, source = node.outputs[0], node.inputs[0]
                assert source is not None
                replacement.type, replacement.shape = output.type, output.shape
                ir.convenience.replace_all_uses_with(output, replacement, replace_graph_outputs=True)
                self.graph.remove(node, safe=True)

    def _replacement(self, node: ir.Node, site: str) -> ir.Value:
        if site in self.recorded.constants:
            return self._initializer(site, _float32(self.recorded.constants[site]))
        owner = self.attachment.shared.get(site, site)
        quantizer = self.attachment.quantizers[owner]
        source = node.inputs[0]
        assert source is not None and source.name is not None
        constant = site in self.recorded.weights
        key = ("weight" if constant and quantizer.weight else source.name, owner)
        if key not in self.made:
            if constant:
                self.made[key] = self._weight(node, site, quantizer)
                if quantizer.port == "bias":
                    self.counts.biases += 1
                else:
                    self.counts.weights += 1
            elif quantizer.spec.format.dynamic:
                self.made[key] = self.dynamic.quantize(node, source, site, quantizer)
                self.counts.dynamic = len(self.dynamic.written)
            else:
                self.made[key] = self._activation(node, source, site, quantizer)
                self.counts.activations += 1
        return self.made[key]

    def _unique(self, name: str) -> str:
        count = self.names.get(name, 0)
        self.names[name] = count + 1
        return f"{name}~{count}" if count else name

    def _initializer(self, name: str, array: NDArray[np.generic]) -> ir.Value:
        value = ir.Value(name=self._unique(name), const_value=ir.tensor(array, name=name))
        assert value.const_value is not None
        value.const_value.name = value.name
        value.shape, value.dtype = ir.Shape(array.shape), value.const_value.dtype
        self.graph.register_initializer(value)
        return value

    def _grid(self, quantizer: Quantizer) -> tuple[ir.Value, ir.Value]:
        if quantizer.site not in self.parameters:
            grid = quantizer.grid()
            dtype = _NUMPY[storage_type(quantizer)]
            self.parameters[quantizer.site] = (
                self._initializer(f"{quantizer.site}.scale", grid.scale.cpu().numpy()),
                self._initializer(
                    f"{quantizer.site}.zero_point", grid.zero_point.cpu().numpy().astype(np.int32).astype(dtype)
                ),
            )
        return self.parameters[quantizer.site]

    def _insert(self, before: ir.Node, op: str, inputs: list[ir.Value], name: str, quantizer: Quantizer) -> ir.Value:
        attributes: list[ir.Attr] = []
        if op in ("QuantizeLinear", "DequantizeLinear") and quantizer.layout.granularity != "tensor":
            attributes.append(ir.AttrInt64("axis", quantizer.layout.axis))
            if quantizer.layout.group:
                attributes.append(ir.AttrInt64("block_size", quantizer.layout.group))
        node = ir.Node("", op, inputs, attributes=attributes, name=self._unique(f"{op}:{name}"))
        node.outputs[0].name = self._unique(name)
        self.graph.insert_before(before, node)
        return node.outputs[0]

    def _weight(self, node: ir.Node, site: str, quantizer: Quantizer) -> ir.Value:
        scale, zero_point = self._grid(quantizer)
        kind = storage_type(quantizer)
        recorded = self.recorded.weights[site]
        guard = quantizer.spec.guard
        if guard is not None and not guard_holds(guard, recorded, kind=quantizer.kind):
            raise ExportError(
                f"the weight violates its guard {guard}, because it changed after calibration",
                where=quantizer.site,
                fix="run calibrate(model, batches) after training, then export",
                code="guard-violated",
            )
        codes = recorded.cpu().numpy().astype(_NUMPY[kind])
        integers = self._initializer(f"{site}.codes", codes)
        inputs = [integers, scale] if kind == ir.DataType.INT32 else [integers, scale, zero_point]
        return self._insert(node, "DequantizeLinear", inputs, quantizer.site, quantizer)

    def _activation(self, node: ir.Node, source: ir.Value, site: str, quantizer: Quantizer) -> ir.Value:
        scale, zero_point = self._grid(quantizer)
        if not fills_type(quantizer):
            source = self._clip(node, source, quantizer)
        codes = self._insert(node, "QuantizeLinear", [source, scale, zero_point], f"{site}.codes", quantizer)
        codes.dtype, codes.shape = storage_type(quantizer), source.shape
        return self._insert(node, "DequantizeLinear", [codes, scale, zero_point], site, quantizer)

    def _clip(self, node: ir.Node, source: ir.Value, quantizer: Quantizer) -> ir.Value:
        """Clip to the representable range first, if there are fewer codes than in the storage type (±127, 6 bits)."""
        grid = quantizer.grid()
        if quantizer.layout.granularity != "tensor":
            raise ExportError(
                "activations with fewer codes than their storage type must be per tensor",
                where=quantizer.site,
                value=str(quantizer.format),
                fix="use a per-tensor format",
                code="unsupported-format",
            )
        bounds = [
            ((code - grid.zero_point) * grid.scale).to(torch.float32).cpu().numpy().reshape(())
            for code in (grid.qmin, grid.qmax)
        ]
        low, high = (
            self._initializer(f"{quantizer.site}.{end}", bound)
            for end, bound in zip(("low", "high"), bounds, strict=True)
        )
        return self._insert(node, "Clip", [source, low, high], f"{quantizer.site}.clipped", quantizer)

    def check(self) -> None:
        """Verify that no pass added or removed Q/DQ pairs."""
        quantize = sum(node.op_type == "QuantizeLinear" for node in self.graph) - self.dynamic.quantize_linears
        dequantize = sum(node.op_type == "DequantizeLinear" for node in self.graph)
        wanted = self.counts
        if (quantize, dequantize) != (wanted.activations, wanted.activations + wanted.weights + wanted.biases):
            raise ExportError(
                "the Q/DQ nodes of the artefact differ from the plan",
                value=f"{quantize} Q and {dequantize} DQ",
                fix=f"expected {wanted.activations} Q and "
                f"{wanted.activations + wanted.weights + wanted.biases} DQ: please report this",
                code="internal-mismatch",
            )


def _check_products(model: ir.Model) -> None:
    """Integer kernels multiply the scales of both operands in float32, so the product must be in its range."""
    problems: dict[str, Problem] = {}
    for node in model.graph:
        if node.op_type not in _PRODUCTS:
            continue
        operands = [value for value in node.inputs[:2] if value is not None]
        scales = [(str(value.name), scale) for value in operands if (scale := _scale_of(value)) is not None]
        if len(scales) == 2:
            (_, first), (site, second) = scales
            problem = product_problem(first.max(), second, where=site)
            if problem is not None:
                problems[site] = problem
    if problems:
        raise PlanError(list(problems.values()), title="runtimes can't compute with these scales")


def _scale_of(value: ir.Value) -> Tensor | None:
    """The scales of a DequantizeLinear's result."""
    producer = value.producer()
    if producer is None or producer.op_type != "DequantizeLinear":
        return None
    scale = producer.inputs[1]
    return None if scale is None or scale.const_value is None else torch.from_numpy(scale.const_value.numpy().copy())


def _fold_weight_transposes(model: ir.Model) -> None:
    """Move a Transpose into the codes before a DQ: runtimes fuse only a DQ that feeds the operator directly."""
    graph = model.graph
    for producer in [node for node in graph if node.op_type == "DequantizeLinear"]:
        source, codes = producer.outputs[0], producer.inputs[0]
        users = [use.node for use in source.uses()]  # several if a weight is used more than once
        if codes is None or codes.const_value is None or source.is_graph_output():
            continue
        array = codes.const_value.numpy()
        permutations = [permutation_of(node, array.ndim) for node in users]
        permutation = permutations[0] if permutations else None
        if permutation is None or any(other != permutation for other in permutations):
            continue
        if "axis" in producer.attributes:
            axis = producer.attributes["axis"].as_int() % array.ndim
            producer.attributes["axis"] = ir.AttrInt64("axis", permutation.index(axis))
        if "block_size" in producer.attributes:  # blocked scales have the weight's rank and are transposed too
            for value in (producer.inputs[1], producer.inputs[2]):
                assert value is not None and value.const_value is not None
                set_constant(value, value.const_value.numpy().transpose(permutation))
        set_constant(codes, array.transpose(permutation))
        for node in users:
            output = node.outputs[0]
            source.shape, source.type = output.shape, output.type
            ir.convenience.replace_all_uses_with(output, source)
            graph.remove(node, safe=True)


def _flatten_matrices(model: ir.Model) -> None:
    """Make per-channel weights of matrix products two-dimensional, as ONNX Runtime's kernels require.

    Leading axes of length 1 are removed and added to the result again. Other weights are reshaped after their
    DequantizeLinear, and the product runs in float.
    """
    graph = model.graph
    for producer in [node for node in graph if node.op_type == "DequantizeLinear"]:
        value, codes = producer.outputs[0], producer.inputs[0]
        users = list(value.uses())
        if codes is None or codes.const_value is None or value.is_graph_output() or "axis" not in producer.attributes:
            continue
        shape = tuple(codes.const_value.shape.numpy())
        if len(shape) == 2 or not any(use.node.op_type == "MatMul" and use.idx == 1 for use in users):
            continue
        axis = producer.attributes["axis"].as_int() % len(shape)
        only_products = all(use.node.op_type == "MatMul" and use.idx == 1 and use.node.inputs[0] for use in users)
        ranks = [_rank(use.node.inputs[0]) for use in users]
        if len(shape) > 2 and set(shape[:-2]) == {1} and axis >= len(shape) - 2 and only_products and None not in ranks:
            _reshape_constants(producer, shape[-2:], axis - len(shape) + 2)
            value.shape = ir.Shape(shape[-2:])
            for use, rank in zip(users, ranks, strict=True):
                assert rank is not None
                _unsqueeze_behind(graph, use.node, max(0, len(shape) - max(rank, 2)))
        elif axis == len(shape) - 1 and "block_size" not in producer.attributes:
            matrix = (int(np.prod(shape[:-1])), shape[-1]) if len(shape) > 2 else (shape[0], 1)
            _reshape_constants(producer, matrix, 1 if len(shape) > 2 else 0)
            size = ir.Value(name=f"{codes.name}.shape", const_value=ir.tensor(np.array(shape, np.int64)))
            assert size.const_value is not None
            size.const_value.name, size.shape, size.dtype = size.name, ir.Shape([len(shape)]), ir.DataType.INT64
            graph.register_initializer(size)
            reshape = ir.Node("", "Reshape", [value, size])
            reshape.outputs[0].name, reshape.outputs[0].shape = f"{value.name}.reshaped", ir.Shape(shape)
            reshape.outputs[0].type, value.shape = value.type, ir.Shape(matrix)
            graph.insert_after(producer, reshape)
            for use in users:
                use.node.replace_input_with(use.idx, reshape.outputs[0])


def _rank(value: ir.Value | None) -> int | None:
    return None if value is None or value.shape is None else len(value.shape)


def _reshape_constants(producer: ir.Node, shape: tuple[int, ...], axis: int) -> None:
    """Reshape the codes of a DequantizeLinear, and blocked scales, to drop leading axes of length 1."""
    blocked = "block_size" in producer.attributes
    for index, value in enumerate(producer.inputs):
        if value is None or value.const_value is None or (index and not blocked):
            continue
        array = value.const_value.numpy()
        set_constant(value, array.reshape(array.shape[-2:] if blocked else shape))
    producer.attributes["axis"] = ir.AttrInt64("axis", axis)


def _unsqueeze_behind(graph: ir.Graph, product: ir.Node, count: int) -> None:
    """Add the leading axes of the weight to the product's result."""
    if not count:
        return
    result = product.outputs[0]
    axes = ir.Value(name=f"{result.name}.axes", const_value=ir.tensor(np.arange(count, dtype=np.int64)))
    assert axes.const_value is not None
    axes.const_value.name, axes.shape, axes.dtype = axes.name, ir.Shape([count]), ir.DataType.INT64
    graph.register_initializer(axes)
    wider = ir.Node("", "Unsqueeze", [result, axes])
    wider.outputs[0].name, wider.outputs[0].type, wider.outputs[0].shape = result.name, result.type, result.shape
    result.name, result.shape = f"{result.name}.matrix", None
    graph.insert_after(product, wider)
    ir.convenience.replace_all_uses_with(result, wider.outputs[0], replace_graph_outputs=True)
    wider.replace_input_with(0, result)


def permutation_of(node: ir.Node, rank: int) -> list[int] | None:
    """The permutation of a Transpose; None for other operators."""
    if node.op_type != "Transpose":
        return None
    return list(node.attributes["perm"].as_ints()) if "perm" in node.attributes else list(range(rank))[::-1]


def set_constant(value: ir.Value, array: NDArray[np.generic]) -> None:
    """Replace the contents of an initializer, with the same type."""
    kind = value.dtype
    value.const_value = ir.tensor(np.ascontiguousarray(array), name=value.name, dtype=kind)
    value.shape = ir.Shape(array.shape)
