"""Rewrite programs of `torch.export` before their translation: inline regions and fold constants.

`torch.export` represents `torch.autocast(...)`, `torch.no_grad()` and `torch.enable_grad()` as subgraphs with a mode. A
deployed program has no gradients or modes, and the search for markers must reach all operators.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument

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
