"""The uniform plan: everything that the backend can run, in one format, for this machine."""

from __future__ import annotations

from collections.abc import Iterable

from bitwright.backends import BackendTable, backend, place
from bitwright.deploy import saturates
from bitwright.graph import Graph
from bitwright.plan import Plan


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
    """Place quantizers by the backend's rules; `saturating=None` asks this machine (say it if another one deploys)."""
    table = backend(target)
    if saturating is None:
        saturating = table.guard is not None and table.runtime is not None and saturates(table.runtime)
    return place(
        graph,
        table,
        weights=weights,
        activations=activations,
        observer=observer,
        weight_observer=weight_observer,
        quantizer=quantizer,
        keep_float=keep_float,
        saturating=saturating,
        model=model,
    )
