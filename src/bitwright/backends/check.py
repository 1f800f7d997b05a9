"""Does a plan keep to what its backend can run?"""

from __future__ import annotations

from dataclasses import replace

from bitwright.backends.table import BackendTable
from bitwright.errors import PlanError, Problem
from bitwright.graph import Graph
from bitwright.plan import Plan
from bitwright.plan.plan import is_pattern


def fitting(plan: Plan, table: BackendTable, graph: Graph, *, name: str | None = None) -> Plan:
    """The plan, resolved for a model (`name`) that the backend shall run; raises with all problems of both kinds."""
    problems = plan.validate(graph)
    # patterns of a plan that can't be resolved have no sites that a format could be wrong for
    known = replace(plan, sites={key: spec for key, spec in plan.sites.items() if not is_pattern(key)})
    problems += check_plan(known if problems else plan.resolve(graph), table, graph)
    if problems:
        raise PlanError(problems, title=misfit(plan, name))
    return plan.resolve(graph)


def misfit(plan: Plan, name: str | None) -> str:
    """How a list of problems begins: a plan of another model is named as such."""
    if name is None or plan.model in (None, name):
        return "the plan has problems"
    return f"the plan has problems: it was made for {plan.model!r}, and this is {name!r}"


def check_plan(plan: Plan, table: BackendTable, graph: Graph | None = None) -> list[Problem]:
    """Every site whose format the target can't run; a graph tells which operands are weights."""
    roles = {} if graph is None else {op.site(port.name): port.role for op in graph.ops for port in op.ports}
    problems: list[Problem] = []
    for site, spec in plan.quantized:
        if spec.share is not None or spec.quantizer == "product":
            continue
        weight = site.endswith(":weight")
        choice = table.weights if weight else table.activations
        # an operand may be a weight (x @ w) or a constant that counts as data (positions): then either list will do
        unsure = roles.get(site, "weight") == "weight" and site.rpartition(":")[2].startswith("input")
        if not choice.allows(spec.format) and not (unsure and table.weights.allows(spec.format)):
            problems.append(
                Problem(
                    what=f"{table.name} can't run this format here",
                    where=site,
                    value=str(spec.format),
                    fix=f"use one of: {', '.join(choice.formats)}, float",
                )
            )
    return problems
