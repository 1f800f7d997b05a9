"""The uniform plan: everything that the backend can run, in one format, for this machine."""

from __future__ import annotations

from collections.abc import Iterable

from bitwright.backends import BackendTable, backend, place
from bitwright.deploy import saturates
from bitwright.errors import PlanError, Problem, did_you_mean
from bitwright.graph import Graph
from bitwright.plan import Plan
from bitwright.registry import OBSERVERS, QUANTIZERS


def make_plan(
    graph: Graph,
    target: str | BackendTable = "onnxruntime",
    *,
    weights: str | None = None,
    activations: str | None = None,
    observer: str | None = None,
    weight_observer: str | None = None,
    quantizer: str = "plain",
    keep_float: Iterable[str] = (),
    saturating: bool | None = None,
    model: str | None = None,
) -> Plan:
    """Place quantizers by the backend's rules.

    `saturating=None` asks this machine: say it if another one deploys.
    """
    table = backend(target)
    # Once for each name, here; the plan's own validation would say it for each site.
    problems = [
        Problem(what=f"unknown {registry.kind}", where=where, value=name, fix=did_you_mean(name, registry.names()))
        for where, name, registry in (
            ("observer", observer, OBSERVERS),
            ("weight_observer", weight_observer, OBSERVERS),
            ("quantizer", quantizer, QUANTIZERS),
        )
        if name is not None and name not in registry
    ]
    if problems:
        raise PlanError(problems)
    if saturating is None:
        saturating = table.guard is not None and table.runtime is not None and saturates(table.runtime)
    return place(
        graph,
        target,
        weights=weights,
        activations=activations,
        observer=observer,
        weight_observer=weight_observer,
        quantizer=quantizer,
        keep_float=keep_float,
        saturating=saturating,
        model=model,
    )
