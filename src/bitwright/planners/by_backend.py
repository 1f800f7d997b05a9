"""The uniform plan: everything that the backend can run, in one format, for this machine."""

from __future__ import annotations

from typing import Unpack

from bitwright.backends import BackendTable, Choices, backend, place
from bitwright.deploy import saturates
from bitwright.errors import PlanError, Problem, did_you_mean
from bitwright.graph import Graph
from bitwright.plan import Plan
from bitwright.registry import OBSERVERS, QUANTIZERS


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
    # Once for each name, here; the plan's own validation would say it for each site.
    problems = [
        Problem(what=f"unknown {registry.kind}", where=where, value=name, fix=did_you_mean(name, registry.names()))
        for where, name, registry in (
            ("observer", choices.get("observer"), OBSERVERS),
            ("weight_observer", choices.get("weight_observer"), OBSERVERS),
            ("quantizer", choices.get("quantizer"), QUANTIZERS),
            ("weight_quantizer", choices.get("weight_quantizer"), QUANTIZERS),
        )
        if name is not None and name not in registry
    ]
    if problems:
        raise PlanError(problems)
    if choices.get("saturating") is None and table.guard is not None and table.runtime is not None:
        choices["saturating"] = saturates(table.runtime)
    return place(graph, target, model=model, **choices)
