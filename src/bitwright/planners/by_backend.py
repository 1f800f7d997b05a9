"""The uniform plan: everything that the backend can run, in one format, for this machine."""

from __future__ import annotations

from typing import Unpack

from bitwright.arguments import strict
from bitwright.backends import BackendTable, Choices, backend, mistakes, patterns_of, place
from bitwright.deploy import saturates
from bitwright.errors import PlanError
from bitwright.graph import Graph
from bitwright.plan import Plan


@strict
def make_plan(
    graph: Graph,
    target: str | BackendTable = "onnxruntime",
    *,
    model: str | None = None,
    **choices: Unpack[Choices],
) -> Plan:
    """Place quantizers by the backend's rules.

    Without `saturating` this machine is asked: say it if another one deploys.
    """
    table = backend(target)
    choices["keep_float"] = patterns_of(choices)
    if problems := mistakes(choices, table, graph):  # before this machine is probed
        raise PlanError(problems)
    if choices.get("saturating") is None and table.guard is not None and table.runtime is not None:
        choices["saturating"] = saturates(table.runtime)
    return place(graph, target, model=model, **choices)
