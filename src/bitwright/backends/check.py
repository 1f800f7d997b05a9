"""Does a plan keep to what its backend can run?"""

from __future__ import annotations

from bitwright.backends.table import BackendTable
from bitwright.errors import Problem
from bitwright.graph import Graph
from bitwright.plan import Plan


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
