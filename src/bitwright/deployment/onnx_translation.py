"""Translate programs of `torch.export` to ONNX."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxscript
import torch
from onnx.defs import OpSchema
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument

from bitwright.core.errors import ExportError, Problem
from bitwright.core.tensor_tree import tensors_in

_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled
_AUTOCAST: Any = torch._higher_order_ops.wrap.wrap_with_autocast
# Operators with explicit conversions, which autocast doesn't change.
_CONVERSIONS = ("to", "_to_copy", "type_as", "copy_", "copy", "site")


def inline_regions(program: torch.export.ExportedProgram) -> None:
    """Inline autocast and gradient regions, in place; casts of an enabled autocast become operators."""
    _inline(program.graph_module, program.graph_signature)


def _inline(module: fx.GraphModule, signature: Any = None) -> None:
    graph = module.graph
    changed = False
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in (_GRAD, _AUTOCAST):
            continue
        at = 1 if node.target is _GRAD else 4  # the modes come first: enabled, or device, dtype, enabled, cache
        body = getattr(module, str(node.args[at].target))
        enabled = node.target is _AUTOCAST and bool(node.args[2])
        _inline(body)
        inputs = [inner for inner in body.graph.nodes if inner.op == "placeholder"]
        names: dict[fx.Node, Any] = dict(zip(inputs, node.args[at + 1 :], strict=True))
        with graph.inserting_before(node):
            for inner in body.graph.nodes:
                if inner.op == "get_attr":  # from a nested region: use a unique name
                    name = f"_{node.name}_{inner.target}"
                    setattr(module, name, getattr(body, str(inner.target)))
                    names[inner] = graph.get_attr(name)
                elif inner.op == "output":
                    results = fx.map_arg(inner.args[0], names.__getitem__)
                elif inner.op != "placeholder":
                    names[inner] = copied = graph.node_copy(inner, names.__getitem__)
                    if enabled:
                        _cast_inputs(graph, copied)
        _replace(graph, node, results, signature)
        changed = True
    if changed:
        graph.lint()
        module.recompile()


def _replace(graph: fx.Graph, node: fx.Node, results: Any, signature: Any) -> None:
    def swap(old: fx.Node, new: fx.Node) -> None:
        old.replace_all_uses_with(new)
        if signature is not None:
            signature.replace_all_uses(old.name, new.name)

    body = node.args[1 if node.target is _GRAD else 4]
    if isinstance(results, fx.Node):
        swap(node, results)
    else:
        for user in list(node.users):
            assert user.target is operator.getitem
            swap(user, results[user.args[1]])
            graph.erase_node(user)
    graph.erase_node(node)
    if isinstance(body, fx.Node) and not body.users:
        graph.erase_node(body)


def _cast_inputs(graph: fx.Graph, node: fx.Node) -> None:
    """Add the casts of autocast as operators; the dtype of the result determines that of the inputs."""
    value = node.meta.get("val")
    value = value[0] if isinstance(value, (tuple, list)) and value else value
    name = getattr(node.target, "__name__", "").partition(".")[0]
    if not isinstance(value, Tensor) or not value.is_floating_point() or name in _CONVERSIONS or "dtype" in node.kwargs:
        return
    dtype = value.dtype

    def cast(source: fx.Node) -> fx.Node:
        given = source.meta.get("val")
        if not isinstance(given, Tensor) or not given.is_floating_point() or given.dtype == dtype:
            return source
        with graph.inserting_before(node):
            converted = graph.call_function(torch.ops.aten.to.dtype, (source, dtype))
        converted.meta["val"] = given.to(dtype)
        return converted

    node.args, node.kwargs = fx.map_arg(node.args, cast), fx.map_arg(node.kwargs, cast)


def fold_constants(program: torch.export.ExportedProgram) -> bool:
    """Compute values that don't depend on inputs, in place; returns whether there were any.

    Parametrized weights are computed by operators that runtimes don't support (`matrix_exp`, `linalg_qr`). Only results
    that other operators read are stored.
    """
    graph, signature = program.graph, program.graph_signature
    values = _stored(program)
    # new tensors (`torch.eye`) are constant too, unless an operator may write into them
    writes = any(getattr(getattr(node.target, "_schema", None), "is_mutable", False) for node in graph.nodes)
    with torch.no_grad():
        for node in graph.nodes:
            if node.op == "call_function" and _is_constant(node, values, fresh=not writes):
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
    found = [
        node
        for node, value in values.items()
        if node.op == "call_function" and isinstance(value, Tensor) and any(user not in values for user in node.users)
        if node.all_input_nodes
    ]
    first = next(node for node in graph.nodes if node.op != "placeholder" or node.name in signature.user_inputs)
    for index, node in enumerate(found):
        name = f"c_folded_{index}"
        with graph.inserting_before(first):
            constant = graph.placeholder(name)
        constant.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(constant)
        arg = TensorArgument(name=constant.name)
        spec = InputSpec(kind=InputKind.CONSTANT_TENSOR, arg=arg, target=name, persistent=None)
        at = sum(spec.kind != InputKind.USER_INPUT for spec in signature.input_specs)
        signature.input_specs.insert(at, spec)
        program.constants[name] = values[node].detach().clone()
    graph.eliminate_dead_code()
    program.graph_module.recompile()
    return bool(found)


def _stored(program: torch.export.ExportedProgram) -> dict[fx.Node, Any]:
    """Parameters, immutable buffers and constants, by their placeholders."""
    signature = program.graph_signature
    state = {**program.state_dict, **program.constants}
    mutable = set(signature.buffers_to_mutate.values())
    names = {
        spec.arg.name: spec.target
        for spec in signature.input_specs
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR) and spec.target in state
    }
    return {
        node: state[names[node.name]]
        for node in program.graph.nodes
        if node.op == "placeholder" and node.name in names and names[node.name] not in mutable
    }


def _is_constant(node: fx.Node, values: dict[fx.Node, Any], *, fresh: bool) -> bool:
    if node.target is torch.ops.bitwright.site.default:
        return False
    if not node.all_input_nodes and not (fresh and isinstance(node.target, torch._ops.OpOverload)):
        return False
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded not in tags and all(source in values for source in node.all_input_nodes)


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

    Double precision inside a float32 model (a sum, a position) isn't converted: parameters and inputs define its type.
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
