"""The invariant of a plan: every parameter and every operator that multiplies is quantized or listed with a reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from bitwright.backends.decisions import Decisions
from bitwright.errors import Problem
from bitwright.graph import Graph, Op, Port, Source
from bitwright.graph.macs import is_product
from bitwright.plan import Plan, SiteSpec

UNUSED = "no recorded operator reads this parameter: the inputs don't use it, or code reads it that can't be recorded"


def multiplies(op: Op) -> bool:
    """Whether an operator multiplies what it is given, as opposed to moving or scaling it."""
    return op.macs > 0 or is_product(op.kind)


def left_in_float(decisions: Decisions, sites: Mapping[str, SiteSpec]) -> dict[str, str]:
    """What isn't quantized: operator → reason, in the order of the graph, then parameters that no operator reads."""
    graph = decisions.graph
    quantized = _integer_readers(graph, sites)
    placed = _placed(sites)
    bare: dict[str, list[tuple[str, Port]]] = {}  # operator → parameters that it reads without a quantizer
    for parameter in graph.parameters:
        name = parameter.names[0]
        for op, port in readers(graph, Source("param", name)):
            if op.site(port.name) not in placed:
                bare.setdefault(op.name, []).append((name, port))
    found: dict[str, str] = {}
    parameters: dict[str, str] = {}
    for op in graph.ops:
        if op.name in decisions.float:
            found[op.name] = decisions.float[op.name]
        elif op.name in decisions.fold:
            continue
        elif op.name not in quantized:
            if multiplies(op) or op.name in bare:
                found[op.name] = _reason(op, decisions)
        elif op.name in bare:
            if any(op.site(port.name) in placed for port in op.ports):
                parameters |= {name: _float_operand(port, decisions) for name, port in bare[op.name]}
            else:  # it reads integers and computes in float
                found[op.name] = _reason(op, decisions)
    return found | parameters | dict.fromkeys(unread(graph), UNUSED)


def unlisted(graph: Graph, plan: Plan) -> Iterator[Problem]:
    """What is neither quantized nor listed in the plan."""
    quantized, placed = _integer_readers(graph, plan.sites), _placed(plan.sites)
    for op in graph.ops:
        if multiplies(op) and op.name not in quantized and op.name not in plan.float:
            yield _missing("operator", op.name)
    for parameter in graph.parameters:
        name = parameter.names[0]
        uses = list(readers(graph, Source("param", name)))
        if name in plan.float:
            continue
        if not uses:
            yield _missing("parameter", name)
        for op, port in uses:
            if op.site(port.name) not in placed and op.name not in plan.float and op.name not in plan.folds:
                yield _missing("parameter", f"{name} (read by {op.name})")


def readers(graph: Graph, source: Source) -> Iterator[tuple[Op, Port]]:
    """The operators that compute with a parameter, also behind those that only reshape or combine parameters."""
    open_, seen = [source], {source}
    while open_:
        for op, port in graph.consumers.get(open_.pop(), ()):
            made = [Source("op", op.name, index) for index in range(len(op.outputs))]
            if op.constant and any(graph.consumers.get(one) for one in made):
                open_ += [one for one in made if one not in seen]
                seen.update(made)
            else:
                yield op, port


def unread(graph: Graph) -> list[str]:
    """Parameters that no recorded operator reads, by their first names."""
    names = (parameter.names[0] for parameter in graph.parameters)
    return [name for name in names if not graph.consumers.get(Source("param", name))]


def _integer_readers(graph: Graph, sites: Mapping[str, SiteSpec]) -> set[str]:
    """Operators that read a quantized tensor: through a site of their own, or one where the tensor is made."""
    placed = _placed(sites)
    made = {Source("op", op.name) for op in graph.ops if op.site("output") in placed}
    return {
        op.name
        for op in graph.ops
        if any(op.site(port.name) in placed or not made.isdisjoint(port.sources) for port in op.ports)
    }


def _placed(sites: Mapping[str, SiteSpec]) -> set[str]:
    return {site for site, spec in sites.items() if spec.quantizes}


def _float_operand(port: Port, decisions: Decisions) -> str:
    """Why a parameter of an operator with integer operands stays in float."""
    if port.role != "bias":
        return "its operator reads it in float"
    if decisions.table.bias != "int32":
        return f"{decisions.table.name} adds biases in float"
    return "added in float: the operator's input and weight give no grid for this bias"


def _reason(op: Op, decisions: Decisions) -> str:
    table = decisions.table
    if op.name in decisions.kept:
        return "kept in float by request"
    if op.constant:
        return "its result depends on parameters only, not on the input"
    if op.name in decisions.quantized:
        return "none of its operands has a quantizer under this plan"
    if op.kind not in table.operators:
        return f"{table.name} has no integer rule for {op.kind}"
    return f"{table.name} runs {op.kind} in integers only next to other integer operators"


def _missing(what: str, name: str) -> Problem:
    return Problem(
        what=f"this {what} is neither quantized nor listed as float",
        where=name,
        fix="please report this, with the model",
        code="unlisted",
    )
