"""Translations to ONNX that torch.onnx lacks, and conversion of half and double models to float32."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxscript
import torch
from onnx.defs import OpSchema
from torch import nn

from bitwright.core.errors import ExportError, Problem
from bitwright.core.tensor_tree import tensors_in

op: Any = onnxscript.opset21  # its type annotations are those of eager evaluation, not of graph building

# The marker as ONNX operator; it exists only between torch.onnx and `write_qdq`.
_SITE = onnxscript.values.Op(
    onnxscript.values.Opset("bitwright", 1),
    "Site",
    OpSchema(
        "Site",
        "bitwright",
        1,
        inputs=[OpSchema.FormalParameter("x", "T")],
        outputs=[OpSchema.FormalParameter("y", "T")],
        type_constraints=[("T", ["tensor(float)", "tensor(float16)", "tensor(bfloat16)", "tensor(double)"], "")],
        attributes=[OpSchema.Attribute("site", OpSchema.AttrType.STRING)],
    ),
)


def translations(program: torch.export.ExportedProgram) -> dict[Callable[..., Any], Callable[..., Any]]:
    """The operators of this program with a translation here, for torch.onnx's `custom_translation_table`.

    Grouped products are recognized by name, because libraries register copies of torch's operators for compilers.
    """
    found: dict[Callable[..., Any], Callable[..., Any]] = {torch.ops.bitwright.site.default: _site}
    for node in program.graph.nodes:
        name = getattr(node.target, "_opname", None)
        if node.op == "call_function" and name in _BY_NAME:
            found[node.target] = _BY_NAME[name]
    return found


def _site(x: Any, site: str) -> Any:
    return _SITE(x, site=site)


def _grouped_mm(x: Any, weight: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """Multiply consecutive groups of rows of `x` by their own matrices; group g ends before row `offs[g]`."""
    if offs is None:
        return op.MatMul(x, weight)
    if len(x.shape) != 2 or len(weight.shape) != 3 or bias is not None:
        raise ExportError(
            "this form of grouped_mm has no translation to ONNX",
            value=f"{len(x.shape)}-D times {len(weight.shape)}-D",
            fix="multiply rows (2-D) with one matrix per group (3-D), without bias",
            code="operator-without-translation",
        )
    groups, ends = int(weight.shape[0]), op.Cast(offs, to=7)
    axis, begin = op.Constant(value_ints=[0]), op.Constant(value_ints=[0])
    parts = []
    for group in range(groups):
        matrix = op.Gather(weight, op.Constant(value_int=group), axis=0)
        end = op.Slice(ends, op.Constant(value_ints=[group]), op.Constant(value_ints=[group + 1]), axis)
        parts.append(op.MatMul(op.Slice(x, begin, end, axis), matrix))
        begin = end
    # Rows after the last group are undefined in torch; here they are zero.
    rest = op.Shape(op.Slice(x, begin, op.Shape(x, start=0, end=1), axis), start=0, end=1)
    shape = op.Concat(rest, op.Shape(weight, start=2, end=3), axis=0)
    return op.Concat(*parts, op.CastLike(op.Expand(op.Constant(value_float=0.0), shape), x), axis=0)


def _histc(x: Any, bins: int = 100, min: float = 0, max: float = 0) -> Any:
    """The number of values in each of `bins` equal parts of [min, max]; the last part includes max."""
    if min == max:
        raise ExportError(
            "histc without a range has no translation to ONNX",
            value=f"min={min}, max={max}",
            fix="pass min and max",
            code="operator-without-translation",
        )
    flat = op.Reshape(op.Cast(x, to=1), op.Constant(value_ints=[-1]))
    low, width = op.Constant(value_float=float(min)), op.Constant(value_float=(max - min) / bins)
    part = op.Min(op.Floor(op.Div(op.Sub(flat, low), width)), op.Constant(value_float=float(bins - 1)))
    part = op.Where(op.LessOrEqual(flat, op.Constant(value_float=float(max))), part, op.Constant(value_float=-1.0))
    numbers = op.Constant(value_floats=[float(index) for index in range(bins)])
    hits = op.Equal(op.Unsqueeze(part, op.Constant(value_ints=[1])), numbers)
    return op.CastLike(op.ReduceSum(op.Cast(hits, to=1), op.Constant(value_ints=[0]), keepdims=0), x)


_BY_NAME: dict[str, Callable[..., Any]] = {
    "_grouped_mm": _grouped_mm,
    "grouped_mm": _grouped_mm,
    "grouped_mm_fallback": _grouped_mm,
    "histc": _histc,
}


_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_NAMES = {
    torch.float16: ir.DataType.FLOAT16,
    torch.bfloat16: ir.DataType.BFLOAT16,
    torch.float64: ir.DataType.DOUBLE,
}


def to_float32(model: ir.Model, source: nn.Module, inputs: Any) -> tuple[Problem, ...]:
    """Convert all tensors of other float types to float32, in place; returns a warning that lists these types.

    Double precision inside a float32 model (a sum, a position) stays: parameters and inputs define the model's type.
    """
    others = _meant(source, inputs)
    everywhere = [value for graph in model.graphs() for value in _values(graph)]
    others |= {value.dtype for value in everywhere if value.dtype in _HALVES}
    if not others:
        return ()
    for value in everywhere:
        if value.dtype in others:
            value.dtype = ir.DataType.FLOAT
        if value.const_value is not None and value.const_value.dtype in others:
            value.const_value = _converted(value.const_value)
    for graph in model.graphs():
        for node in graph:
            for name, attribute in list(node.attributes.items()):
                if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in others:
                    node.attributes[name] = ir.AttrTensor(name, _converted(attribute.as_tensor()))
                elif _names_type(attribute) and attribute.as_int() in {kind.value for kind in others}:
                    node.attributes[name] = ir.AttrInt64(name, ir.DataType.FLOAT.value)
    names = ", ".join(sorted(kind.name.lower() for kind in others))
    return (
        Problem(
            what=f"the artefact uses float32 where the model uses {names}, including inputs and outputs",
            fix="no action is needed; call model.float() before quantize to simulate in float32 too",
            code="exported-as-float32",
        ),
    )


def _names_type(attribute: ir.Attr) -> bool:
    return attribute.name in ("to", "dtype", "output_dtype") and attribute.type == ir.AttributeType.INT


def _meant(source: nn.Module, inputs: Any) -> set[ir.DataType]:
    """The other float types of the model's parameters and inputs."""
    # quantizers are always float32 and aren't considered
    found = {t.dtype for t in (*source.parameters(), *source.buffers(), *(tensor for _, tensor in tensors_in(inputs)))}
    return {_NAMES[dtype] for dtype in found if dtype in _NAMES}


def _values(graph: ir.Graph | ir.Function) -> Iterable[ir.Value]:
    yield from graph.inputs
    if isinstance(graph, ir.Graph):
        yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs


def _converted(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    array = np.ascontiguousarray(tensor.numpy().astype(np.float32))
    return ir.Tensor(array, name=tensor.name)
