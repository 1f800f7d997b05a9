"""Convert a Q/DQ graph to a .tflite file: tensors and their layouts, integer forms of values, and the flatbuffer.

A value of the graph has up to two forms in the file: its int8 codes, and its float numbers. Operators choose the form
that they compute with; the other one is added by QUANTIZE or DEQUANTIZE when an operator reads it. LiteRT's
convolutions have channels last, so each tensor also records its layout.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from bitwright.core.errors import PlanError, Problem
from bitwright.deployment.onnx_files import digests_of, operator_of, text_digest

STRUCTURE, OWN = "structure", "notes"  # names of digests
NOTES = "bitwright"
"""The name of the metadata that maps our sites to the file's tensors."""
MOVES = frozenset("Reshape Flatten Squeeze Unsqueeze Transpose Identity".split())  # noqa: SIM905
# TFLite's version numbers of kernels for int8; others have version 2, and float kernels version 1
_INT8_VERSIONS = {"CONV_2D": 3, "DEPTHWISE_CONV_2D": 3, "FULLY_CONNECTED": 4, "RESHAPE": 1, "QUANTIZE": 1}
_INT8_VERSIONS |= {"HARD_SWISH": 1, "TRANSPOSE_CONV": 3, "GELU": 2, "BATCH_MATMUL": 2}
_FLOAT_VERSIONS = {"TRANSPOSE_CONV": 3, "FULLY_CONNECTED": 5}


class Unsupported(Exception):
    """LiteRT has no operator for this; the text is the reason."""

    def __init__(self, what: str, fix: str | None = None) -> None:
        super().__init__(what)
        self.fix = fix


class _Missing(Exception):
    """An operand of an operator that is already reported."""


@dataclass(frozen=True, kw_only=True)
class CodeGrid:
    """The grid of an int8 tensor."""

    scale: float
    zero_point: int
    owner: str
    """The site whose quantizer it is."""

    def same(self, other: CodeGrid) -> bool:
        """Whether codes on both grids have the same values."""
        return (self.scale, self.zero_point) == (other.scale, other.zero_point)

    def code(self, value: float) -> int:
        """The code of a number."""
        if math.isinf(value):
            return 127 if value > 0 else -128
        code = np.rint(np.float32(value) / np.float32(self.scale)) + self.zero_point
        return int(np.clip(code, -128, 127))


@dataclass(frozen=True, eq=False, kw_only=True)
class FileTensor:
    """A tensor in the file. Its shape is that of the graph; with `last`, the file has the channels (axis 1) last."""

    index: int
    shape: tuple[int, ...]
    last: bool = False
    grid: CodeGrid | None = None
    dtype: Any = np.float32

    @property
    def rank(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in the file."""
        return channels_last(self.shape) if self.last else self.shape

    def axis(self, axis: int) -> int:
        """The axis in the file of an axis of the graph."""
        axis %= self.rank
        return axis if not self.last or axis == 0 else self.rank - 1 if axis == 1 else axis - 1


def channels_last(shape: Sequence[Any]) -> tuple[Any, ...]:
    """Move the second item to the end."""
    return (*shape[:1], *shape[2:], *shape[1:2])


@dataclass(eq=False)
class _Forms:
    codes: FileTensor | None = None
    real: FileTensor | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class WeightCodes:
    """A constant before a DQ."""

    site: str
    codes: NDArray[Any]
    scale: NDArray[np.float32]
    zero_point: NDArray[np.int64]
    axis: int | None
    owner: str

    @property
    def numbers(self) -> NDArray[np.float32]:
        """The values of the codes."""
        scale, zero = (
            part if self.axis is None else part.reshape([-1 if i == self.axis else 1 for i in range(self.codes.ndim)])
            for part in (self.scale, self.zero_point)
        )
        return ((self.codes.astype(np.int64) - zero) * scale.astype(np.float64)).astype(np.float32)


@dataclass(frozen=True, eq=False, kw_only=True)
class Target:
    """The grid of an operator's result, after activations that LiteRT computes in the same operator."""

    grid: CodeGrid
    end: ir.Value
    """The value that has this grid."""
    low: float
    high: float
    skipped: tuple[ir.Node, ...]

    @property
    def activation(self) -> str | None:
        """LiteRT's name of the fused activation, or None if it has none."""
        names = {(-math.inf, math.inf): "NONE", (0, math.inf): "RELU", (0, 6): "RELU6", (-1, 1): "RELU_N1_TO_1"}
        return names.get((self.low, self.high))


class FileBuilder:
    """Collects tensors and operators, and serializes them."""

    def __init__(self) -> None:
        from ai_edge_litert import schema_py_generated

        self.schema: Any = schema_py_generated
        self.tensors: list[Any] = []
        self.buffers: list[Any] = [self._buffer(None)]  # by convention, the first is empty
        self.operators: list[Any] = []
        self.codes: dict[tuple[str, int], int] = {}
        self.names: dict[str, int] = {}

    def _buffer(self, data: bytes | None) -> Any:
        buffer = self.schema.BufferT()
        buffer.data = None if data is None else np.frombuffer(data, np.uint8)
        return buffer

    def tensor(
        self,
        name: str,
        shape: Sequence[int],
        dtype: Any,
        *,
        scale: NDArray[Any] | None = None,
        zero_point: NDArray[Any] | None = None,
        axis: int = 0,
        data: NDArray[Any] | None = None,
    ) -> int:
        """Add a tensor; with `data`, a constant."""
        count = self.names.get(name, 0)
        self.names[name] = count + 1
        unique = f"{name}~{count}" if count else name
        made = self.schema.TensorT()
        made.name, made.shape = unique.encode(), np.array(shape, np.int32)
        made.type = getattr(self.schema.TensorType, np.dtype(dtype).name.upper())
        made.buffer, made.hasRank = 0, True
        if scale is not None:
            made.quantization = self.schema.QuantizationParametersT()
            made.quantization.scale = np.asarray(scale, np.float32).reshape(-1)
            zeros = np.zeros(made.quantization.scale.shape, np.int64) if zero_point is None else zero_point
            made.quantization.zeroPoint = np.asarray(zeros, np.int64).reshape(-1)
            made.quantization.quantizedDimension = axis
        if data is not None:
            array = np.ascontiguousarray(data)
            made.buffer = len(self.buffers)
            self.buffers.append(self._buffer(array.tobytes()))
        self.tensors.append(made)
        return len(self.tensors) - 1

    def operator(
        self, kind: str, inputs: Sequence[int], outputs: Sequence[int], options: str | None, values: Mapping[str, Any]
    ) -> None:
        """Add an operator; `options` is the name of its table of options."""
        integer = any(self.tensors[index].type == self.schema.TensorType.INT8 for index in inputs if index >= 0)
        version = _INT8_VERSIONS.get(kind, 2) if integer else _FLOAT_VERSIONS.get(kind, 1)
        made = self.schema.OperatorT()
        made.opcodeIndex = self.codes.setdefault((kind, version), len(self.codes))
        made.inputs, made.outputs = np.array(inputs, np.int32), np.array(outputs, np.int32)
        if options is not None:
            table = getattr(self.schema, f"{options}T")()
            for name, value in values.items():
                if not hasattr(table, name):
                    raise AttributeError(f"{options} has no field {name}")
                setattr(table, name, value)
            made.builtinOptionsType, made.builtinOptions = getattr(self.schema.BuiltinOptions, options), table
        self.operators.append(made)

    def enumerated(self, kind: str, name: str) -> int:
        """A number of the schema."""
        return int(getattr(getattr(self.schema, kind), name))

    def finish(self, inputs: Sequence[int], outputs: Sequence[int], notes: dict[str, Any]) -> bytes:
        """The bytes of the file."""
        model = self.schema.ModelT()
        model.version, model.description = 3, b"bitwright"
        model.operatorCodes = []
        for kind, version in self.codes:
            code = self.schema.OperatorCodeT()
            code.builtinCode, code.version = self.enumerated("BuiltinOperator", kind), version
            code.deprecatedBuiltinCode = min(code.builtinCode, 127)
            model.operatorCodes.append(code)
        graph = self.schema.SubGraphT()
        graph.name, graph.tensors, graph.operators = b"main", self.tensors, self.operators
        graph.inputs, graph.outputs = np.array(inputs, np.int32), np.array(outputs, np.int32)
        model.subgraphs, model.buffers = [graph], self.buffers
        return with_notes(packed(model), notes)


def unpacked(data: bytes) -> Any:
    """The contents of a file as objects of LiteRT's schema."""
    from ai_edge_litert import schema_py_generated

    schema: Any = schema_py_generated
    return schema.ModelT.InitFromObj(schema.Model.GetRootAs(data, 0))


def packed(model: Any) -> bytes:
    """The inverse of `unpacked`."""
    import flatbuffers

    builder = flatbuffers.Builder(1 << 16)
    builder.Finish(model.Pack(builder), file_identifier=b"TFL3")
    return bytes(builder.Output())


def with_notes(data: bytes, notes: dict[str, Any]) -> bytes:
    """Add our metadata to a file, with the digests of its constants, its structure and the metadata."""
    from ai_edge_litert import schema_py_generated

    schema: Any = schema_py_generated
    model = unpacked(data)
    digests = {**digests_of(constants_of(model)), STRUCTURE: structure_of(model)}
    text = json.dumps({**notes, "digests": {**digests, OWN: own_digest(notes)}}, ensure_ascii=False)
    metadata, buffer = schema.MetadataT(), schema.BufferT()
    metadata.name, metadata.buffer = NOTES.encode(), len(model.buffers)
    buffer.data = np.frombuffer(text.encode(), np.uint8)
    model.metadata = [metadata]
    model.buffers.append(buffer)
    return packed(model)


def own_digest(notes: Mapping[str, Any]) -> str:
    """The digest of the metadata without its digests."""
    return text_digest(json.dumps({name: value for name, value in notes.items() if name != "digests"}, sort_keys=True))


def constants_of(model: Any) -> dict[str, NDArray[Any]]:
    """The constants of a file, by the name of their tensor."""
    from ai_edge_litert import schema_py_generated

    kinds = {number: name for name, number in vars(schema_py_generated.TensorType).items() if name[0] != "_"}
    found: dict[str, NDArray[Any]] = {}
    for tensor in model.subgraphs[0].tensors:
        if tensor.buffer:
            data = model.buffers[tensor.buffer].data
            raw = b"" if data is None else np.asarray(data, np.uint8).tobytes()
            kind = np.dtype(kinds[tensor.type].lower())
            found[tensor.name.decode()] = np.frombuffer(raw, kind).reshape(_listed(tensor.shape))
    return found


def structure_of(model: Any) -> str:
    """The digest of all tensors and operators, without the values of constants."""
    graph = model.subgraphs[0]
    tensors = [
        [one.name.decode(), _listed(one.shape), one.type, one.buffer, _fields(one.quantization)]
        for one in graph.tensors
    ]
    operators = [
        [
            _fields(model.operatorCodes[one.opcodeIndex]),
            _listed(one.inputs),
            _listed(one.outputs),
            one.builtinOptionsType,
            _fields(one.builtinOptions),
        ]
        for one in graph.operators
    ]
    ends = [_listed(graph.inputs), _listed(graph.outputs), len(model.subgraphs)]
    return text_digest(json.dumps([tensors, operators, ends]))


def _listed(values: Any) -> list[Any]:
    return [] if values is None else [one.item() if isinstance(one, np.generic) else one for one in values]


def _fields(table: Any) -> dict[str, Any]:
    found = {} if table is None else vars(table)
    return {
        name: str(value) if isinstance(value, bytes) else value if np.isscalar(value) else _listed(value)
        for name, value in sorted(found.items())
        if value is not None
    }


Translation = Callable[["GraphWriter", ir.Node], None]


@dataclass
class GraphWriter:
    """Converts the nodes of a graph with static shapes, one after the other."""

    graph: ir.Graph
    operators: Mapping[str, Translation]
    file: FileBuilder = field(default_factory=FileBuilder)
    constants: dict[str, NDArray[Any]] = field(default_factory=dict)
    forms: dict[str, _Forms] = field(default_factory=dict)
    layouts: dict[tuple[int, bool], FileTensor] = field(default_factory=dict)
    made: dict[tuple[str, str], FileTensor] = field(default_factory=dict)
    skipped: set[ir.Node] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)
    sites: dict[str, FileTensor] = field(default_factory=dict)
    weights: dict[str, dict[str, str]] = field(default_factory=dict)
    grids: dict[str, tuple[float, int]] = field(default_factory=dict)
    products: dict[str, bool] = field(default_factory=dict)
    """Whether each convolution or matrix product multiplies integers."""

    def run(self) -> bytes:
        """The bytes of the file; one error lists all operators without translation."""
        for name, value in self.graph.initializers.items():
            if value.const_value is not None:
                self.constants[str(name)] = value.const_value.numpy()
        inputs = [self._input(value) for value in self.graph.inputs]
        for node in self.graph:
            self._attempt(node)
        if self.problems:
            raise PlanError(self.problems, title="these operators can't be converted to LiteRT")
        results = [(str(value.name), self._result(value)) for value in self.graph.outputs]
        notes = {
            "version": 1,
            "inputs": [str(value.name) for value in self.graph.inputs],
            "outputs": [name for name, _ in results],
            "sites": {site: [tensor.index, tensor.last] for site, tensor in self.sites.items()},
            "grids": {owner: list(grid) for owner, grid in self.grids.items()},
            "weights": self.weights,
            "products": self.products,
        }
        return self.file.finish([one.index for one in inputs], [tensor.index for _, tensor in results], notes)

    def _input(self, value: ir.Value) -> FileTensor:
        dtype = np.float32 if value.dtype is None else value.dtype.numpy()
        name, shape = str(value.name), self.shape(value)
        tensor = FileTensor(index=self.file.tensor(name, shape, dtype), shape=shape, dtype=dtype)
        self.forms[name] = _Forms(real=tensor)
        return tensor

    def _result(self, value: ir.Value) -> FileTensor:
        tensor = self.layout(self.real(value), last=False)
        if tensor.index in {index for one in self.graph.inputs for index in [self.forms[str(one.name)].real.index]}:  # type: ignore[union-attr]
            what, fix = "an output of the model is also an input", "leave it out of the model's outputs"
            problem = Problem(what=what, where=str(value.name), fix=fix, code="output-is-input")
            raise PlanError([problem], title="can't write the model")
        return tensor

    def _attempt(self, node: ir.Node) -> None:
        if node in self.skipped:
            return
        try:
            self._node(node)
        except _Missing:
            pass
        except Unsupported as reason:
            fix = reason.fix or "use another runtime for this model, or replace the operator"
            where = operator_of(node)
            self.problems.append(
                Problem(what=str(reason), where=where, value=node.op_type, fix=fix, code="operator-without-translation")
            )

    def _node(self, node: ir.Node) -> None:
        if node.op_type == "QuantizeLinear":
            self._quantize(node)
        elif node.op_type == "DequantizeLinear":
            if node.inputs[0] is not None and str(node.inputs[0].name) not in self.constants:
                codes = self.forms.get(str(node.inputs[0].name))
                if codes is None:
                    raise _Missing
                self.forms[str(node.outputs[0].name)] = codes
        elif not self._fold(node):
            if node.op_type not in self.operators:
                raise Unsupported("LiteRT has no such operator, or Bitwright doesn't translate it")
            self.operators[node.op_type](self, node)

    def _fold(self, node: ir.Node) -> bool:
        """Compute nodes of constants."""
        if node.op_type == "Shape":
            shape = self.shape(node.inputs[0])
            first, end = (node.attributes[k].as_int() if k in node.attributes else None for k in ("start", "end"))
            self.constants[str(node.outputs[0].name)] = np.array(shape[first:end], np.int64)
            return True
        arrays = [None if value is None else self.array(value) for value in node.inputs]
        if any(value is not None and array is None for value, array in zip(node.inputs, arrays, strict=True)):
            return False
        names = [f"i{index}" for index, value in enumerate(node.inputs) if value is not None]
        outputs = [f"o{index}" for index in range(len(node.outputs))]
        proto = ir.serde.serialize_node(node)
        del proto.input[:], proto.output[:]
        proto.input.extend(f"i{index}" if value is not None else "" for index, value in enumerate(node.inputs))
        proto.output.extend(outputs)
        unknown = onnx.TypeProto()
        made = onnx.helper.make_graph(
            [proto],
            "node",
            [onnx.helper.make_value_info(name, unknown) for name in names],
            [onnx.helper.make_value_info(name, unknown) for name in outputs],
        )
        opset = onnx.helper.make_opsetid("", self.graph.opset_imports.get("", 21))
        evaluator = ReferenceEvaluator(onnx.helper.make_model(made, opset_imports=[opset]))
        feed = dict(zip(names, (a for a in arrays if a is not None), strict=True))
        for value, array in zip(node.outputs, evaluator.run(None, feed), strict=True):
            self.constants[str(value.name)] = np.asarray(array)
        return True

    # Reading values

    def shape(self, value: ir.Value | None) -> tuple[int, ...]:
        """The static shape of a value."""
        if value is not None and str(value.name) in self.constants:
            return self.constants[str(value.name)].shape
        forms = None if value is None else self.forms.get(str(value.name))
        known = None if forms is None else forms.codes or forms.real
        if known is not None:
            return known.shape
        shape = None if value is None or value.shape is None else list(value.shape)
        if shape is None or not all(isinstance(size, int) for size in shape):
            raise Unsupported("its shape isn't static")
        return tuple(int(size) for size in shape)  # type: ignore[arg-type]

    def weight(self, value: ir.Value | None) -> WeightCodes | None:
        """The constant codes of a value, or None."""
        node = None if value is None else value.producer()
        if node is None or node.op_type != "DequantizeLinear" or node.inputs[0] is None or node.inputs[1] is None:
            return None
        codes, scale = (self.constants.get(str(one.name)) for one in node.inputs[:2] if one is not None)
        if codes is None or scale is None:
            return None
        site = str(node.inputs[0].name).removesuffix(".codes")
        if "block_size" in node.attributes and node.attributes["block_size"].as_int():
            raise Unsupported("LiteRT doesn't support scales per group", "use int8/channel/sym or int8/tensor/sym")
        third = node.inputs[2] if len(node.inputs) > 2 else None
        zero = np.zeros(scale.shape, np.int64) if third is None else self.constants[str(third.name)].astype(np.int64)
        axis = node.attributes["axis"].as_int() % codes.ndim if scale.ndim and scale.size > 1 else None
        owner = str(node.inputs[1].name).removesuffix(".scale")
        scale = scale.reshape(-1) if scale.ndim and axis is not None else scale.reshape(())
        zero = zero.reshape(scale.shape)
        return WeightCodes(site=site, codes=codes, scale=scale, zero_point=zero, axis=axis, owner=owner)

    def array(self, value: ir.Value | None) -> NDArray[Any] | None:
        """The numbers of a constant, or None."""
        if value is None:
            return None
        if str(value.name) in self.constants:
            return self.constants[str(value.name)]
        found = self.weight(value)
        return None if found is None else found.numbers

    def ints(self, value: ir.Value | None) -> list[int]:
        """A constant list of integers."""
        found = self.array(value)
        if found is None:
            raise Unsupported("an operand that must be constant is computed")
        return [int(item) for item in np.ravel(found)]

    def codes(self, value: ir.Value | None) -> FileTensor | None:
        """The int8 form of a value, or None if it has none."""
        if value is None:
            return None
        name = str(value.name)
        found = self.weight(value)
        if found is not None:
            if found.axis is not None or found.codes.dtype != np.int8:
                return None
            if (name, "codes") not in self.made:
                grid = CodeGrid(scale=float(found.scale), zero_point=int(found.zero_point), owner=found.owner)
                self.made[name, "codes"] = self.keep(found, found.codes, grid=grid)
            return self.made[name, "codes"]
        forms = self.forms.get(name)
        return None if forms is None else forms.codes

    def keep(
        self, weight: WeightCodes, codes: NDArray[Any], *, axis: int = 0, grid: CodeGrid | None = None
    ) -> FileTensor:
        """A constant with the codes of a site, possibly permuted; `axis` is that of scales per channel."""
        name = f"{weight.site}.codes"
        kind = np.int32 if codes.dtype == np.int32 else np.int8
        index = self.file.tensor(
            name,
            codes.shape,
            kind,
            scale=weight.scale,
            zero_point=weight.zero_point,
            axis=axis if weight.axis is not None else 0,
            data=codes.astype(kind),
        )
        stored = self.file.tensors[index].name.decode()
        self.weights.setdefault(weight.site, {"tensor": stored, "owner": weight.owner})
        return FileTensor(index=index, shape=codes.shape, grid=grid, dtype=kind)

    def real(self, value: ir.Value | None) -> FileTensor:
        """The form of a value with its numbers: floats, or the integers of an index."""
        assert value is not None
        name = str(value.name)
        array = self.array(value)
        if array is not None:
            if (name, "real") not in self.made:
                self.made[name, "real"] = self.constant(name, array)
            return self.made[name, "real"]
        if name not in self.forms:
            raise _Missing
        forms = self.forms[name]
        if forms.real is None:
            assert forms.codes is not None
            codes = forms.codes
            forms.real = self.emit("DEQUANTIZE", [codes], codes.shape, last=codes.last, name=name)
        return forms.real

    def constant(self, name: str, array: NDArray[Any]) -> FileTensor:
        """A constant in the layout of the graph."""
        dtype = np.float32 if array.dtype.kind == "f" else array.dtype
        index = self.file.tensor(name, array.shape, dtype, data=array.astype(dtype))
        return FileTensor(index=index, shape=array.shape, dtype=dtype)

    def numbers(self, values: Sequence[int], name: str = "numbers") -> int:
        """The index of a constant list of int32."""
        return self.file.tensor(name, (len(values),), np.int32, data=np.array(values, np.int32))

    def layout(self, tensor: FileTensor, *, last: bool) -> FileTensor:
        """The same tensor with the channels last, or with the layout of the graph."""
        if tensor.last == last or tensor.rank < 3:
            return tensor
        key = (tensor.index, last)
        if key not in self.layouts:
            order = channels_last(range(tensor.rank)) if last else (0, tensor.rank - 1, *range(1, tensor.rank - 1))
            shape = channels_last(tensor.shape) if last else tensor.shape
            sizes = [size for size in tensor.stored_shape[1:] if size != 1]
            if sizes == [size for size in shape[1:] if size != 1] and len(sizes) <= 1:  # nothing moves
                made = self.reshaped(tensor, shape)
                made = FileTensor(index=made.index, shape=tensor.shape, last=last, grid=tensor.grid, dtype=tensor.dtype)
            else:
                extra = [self.numbers(order)]
                made = self.emit("TRANSPOSE", [tensor], tensor.shape, last=last, like=tensor, extra=extra)
            self.layouts[key], self.layouts[made.index, tensor.last] = made, tensor
        return self.layouts[key]

    def reshaped(self, tensor: FileTensor, shape: Sequence[int]) -> FileTensor:
        """A RESHAPE of the tensor as the file has it."""
        extra, values = [self.numbers(list(shape))], {"newShape": np.array(shape, np.int32)}
        return self.emit("RESHAPE", [tensor], shape, like=tensor, extra=extra, options="ReshapeOptions", values=values)

    # Writing values

    def emit(
        self,
        kind: str,
        inputs: Sequence[FileTensor],
        shape: Sequence[int],
        *,
        last: bool = False,
        grid: CodeGrid | None = None,
        like: FileTensor | None = None,
        dtype: Any = np.float32,
        extra: Sequence[int] = (),
        before: Sequence[int] = (),
        options: str | None = None,
        values: Mapping[str, Any] | None = None,
        name: str | None = None,
    ) -> FileTensor:
        """Add an operator with one output; `like` gives its grid and type. `before` and `extra` surround the inputs."""
        if like is not None:
            grid, dtype = like.grid, like.dtype
        elif grid is not None:
            dtype = np.int8
        made = FileTensor(index=len(self.file.tensors), shape=tuple(shape), last=last, grid=grid, dtype=dtype)
        scale = None if grid is None else np.array([grid.scale], np.float32)
        zero = None if grid is None else np.array([grid.zero_point])
        self.file.tensor(name or kind.lower(), made.stored_shape, dtype, scale=scale, zero_point=zero)
        reads = [*before, *(tensor.index for tensor in inputs), *extra]
        self.file.operator(kind, reads, [made.index], options, values or {})
        return made

    def put(self, value: ir.Value, tensor: FileTensor) -> None:
        """Set the form of a value."""
        forms = self.forms.setdefault(str(value.name), _Forms())
        if tensor.grid is not None:
            forms.codes = tensor
        else:
            forms.real = tensor

    def put_target(self, target: Target, tensor: FileTensor, *, clamp: bool = False) -> None:
        """Set the codes of an operator with fused activations; with `clamp`, they are applied to the codes here."""
        if clamp:
            tensor = self.clamped(tensor, target.low, target.high)
        self.skipped.update(target.skipped)
        self.put(target.end, tensor)

    def clamped(self, tensor: FileTensor, low: float, high: float) -> FileTensor:
        """Codes limited to those of the bounds; rounding is monotonic, so the order doesn't matter."""
        grid = tensor.grid
        assert grid is not None
        for kind, bound, idle in (("MAXIMUM", low, -128), ("MINIMUM", high, 127)):
            if (code := grid.code(bound)) != idle:
                scale, zero = np.array([grid.scale], np.float32), np.array([grid.zero_point])
                data = np.array([code], np.int8)
                limit = self.file.tensor("bound", (1,), np.int8, scale=scale, zero_point=zero, data=data)
                options = "MaximumMinimumOptions"
                tensor = self.emit(
                    kind, [tensor], tensor.shape, last=tensor.last, like=tensor, extra=[limit], options=options
                )
        return tensor

    def requantized(self, tensor: FileTensor, grid: CodeGrid) -> FileTensor:
        """The same numbers on another grid."""
        if tensor.grid is not None and tensor.grid.same(grid):
            return tensor
        return self.emit(
            "QUANTIZE", [tensor], tensor.shape, last=tensor.last, grid=grid, options="QuantizeOptions", name=grid.owner
        )

    def grid_of(self, node: ir.Node) -> CodeGrid:
        """The grid of a QuantizeLinear."""
        scale, zero = (self.array(value) for value in node.inputs[1:3])
        site = str(node.outputs[0].name).removesuffix(".codes")
        int8 = "use int8/tensor/sym or int8/tensor/asym for this site, as the backend tflitemicro does"
        if scale is None or zero is None or scale.size != 1:
            raise Unsupported("LiteRT supports only one constant scale per activation", int8)
        if zero.dtype != np.int8:
            raise Unsupported(f"LiteRT's integer kernels have int8 activations, but {site} has {zero.dtype}", int8)
        assert node.inputs[1] is not None
        owner = str(node.inputs[1].name).removesuffix(".scale")
        return CodeGrid(scale=float(scale.reshape(())), zero_point=int(zero.reshape(())), owner=owner)

    def _quantize(self, node: ir.Node) -> None:
        source, output = node.inputs[0], node.outputs[0]
        assert source is not None
        grid = self.grid_of(node)
        site = str(output.name).removesuffix(".codes")
        forms = self.forms.get(str(source.name))
        if forms is None and self.array(source) is None:
            raise _Missing
        tensor = self.requantized(self.real(source) if forms is None or forms.codes is None else forms.codes, grid)
        self.forms[str(output.name)] = _Forms(codes=tensor)
        self.sites[site] = tensor
        assert node.inputs[1] is not None and node.inputs[2] is not None
        self.grids.setdefault(grid.owner, (grid.scale, grid.zero_point))

    def target(self, value: ir.Value) -> Target | None:
        """The grid that all readers of a value expect, after activations and moves; None if a reader needs floats."""
        low, high, end = -math.inf, math.inf, value
        skipped: list[ir.Node] = []
        moved = False
        while not value.is_graph_output():
            users = [use.node for use in value.uses()]
            if users and all(user.op_type == "QuantizeLinear" for user in users):
                grid = self.grid_of(users[0])
                return Target(grid=grid, end=end, low=low, high=high, skipped=tuple(skipped))
            if len(users) != 1:
                return None
            user = users[0]
            bounds = None if moved else self._bounds(user)
            if bounds is not None:
                low, high = min(max(low, bounds[0]), bounds[1]), max(min(high, bounds[1]), bounds[0])
                skipped.append(user)
                end = user.outputs[0]
            elif user.op_type in MOVES:
                moved = True
            else:
                return None
            value = user.outputs[0]
        return None

    def _bounds(self, node: ir.Node) -> tuple[float, float] | None:
        if node.op_type == "Relu":
            return 0.0, math.inf
        if node.op_type != "Clip":
            return None
        found = [math.nan if v is not None and self.array(v) is None else self.bound(v) for v in node.inputs[1:3]]
        low, high = (*found, None, None)[:2]
        if any(one is not None and math.isnan(one) for one in (low, high)):
            return None
        return -math.inf if low is None else low, math.inf if high is None else high

    def bound(self, value: ir.Value | None) -> float | None:
        """A constant bound, or None."""
        found = self.array(value)
        return None if found is None else float(found.reshape(()))
