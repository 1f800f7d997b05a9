"""Read quantizers, formats and folding from a prepared model, and compare them with the settings of a row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from bitwright.backends import BackendTable
from bitwright.bench.grid import RowTask
from bitwright.bench.leaderboard import Executed, ExecutedSites, Observers
from bitwright.core.registry import OBSERVERS, QUANTIZERS
from bitwright.graph import Graph, Op
from bitwright.graph.naming import SiteName
from bitwright.plan import NO_FOLDING, Plan
from bitwright.quantizers import Quantizer, attachment_of
from bitwright.quantizers.folding import BY_STRATEGY

_POINTS = 4096
_STRATEGY_OF = {kind: strategy for strategy, kind in BY_STRATEGY.items()}


def read_executed(model: nn.Module, plan: Plan) -> Executed:
    """The classes, formats and levels of all quantizers, and the folding of norms."""
    attachment = attachment_of(model)
    found: dict[bool, dict[tuple[str, str], list[int]]] = {True: {}, False: {}}
    biases = 0
    for quantizer in attachment.quantizers.values():
        if quantizer.of:  # a bias on the accumulator's grid, which follows from other quantizers
            biases += 1
            continue
        key = class_name(type(quantizer)), str(quantizer.format)
        found[quantizer.weight].setdefault(key, []).append(levels(model, quantizer))
    folding = Counter(str(_STRATEGY_OF[type(fold)]) for fold in attachment.folds.values())
    return Executed(
        weights=tuple(_sites(found[True])),
        activations=tuple(_sites(found[False])),
        biases=biases,
        folding=dict(sorted(folding.items())),
        kept_float=dict(plan.float),
    )


def _sites(found: dict[tuple[str, str], list[int]]) -> Iterator[ExecutedSites]:
    for (name, format), counts in sorted(found.items()):
        yield ExecutedSites(quantizer=name, format=format, sites=len(counts), levels=max(counts))


def class_name(kind: type) -> str:
    """The full name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


@torch.no_grad()
def levels(model: nn.Module, quantizer: Quantizer) -> int:
    """The largest number of different values that a quantizer returns for one of its scales, counted by running it."""
    if quantizer.weight:
        values: Tensor = getattr(model.get_submodule(SiteName.parse(quantizer.site).path), quantizer.port).detach()
    else:
        # values up to twice the range, dense around zero, where non-uniform levels are
        end = 2.0 * float(quantizer.scale.abs().max()) * (quantizer.qmax + 1)
        positive = end * torch.cat([torch.linspace(0, 1, _POINTS), torch.logspace(-6, 0, _POINTS)])
        values = torch.cat([-positive, positive])
    given = quantizer.quantize(values.to(torch.float32))
    return max(int(row.unique().numel()) for row in quantizer.layout.rows(given))


def read_observers(model: nn.Module) -> Observers:
    """The classes of the observers that set the ranges."""
    found: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    for quantizer in attachment_of(model).quantizers.values():
        if not quantizer.of:
            found[quantizer.weight][_observer(quantizer)] += 1
    return Observers(weights=dict(sorted(found[True].items())), activations=dict(sorted(found[False].items())))


def _observer(quantizer: Quantizer) -> str:
    """The class that set the range. Quantizers that follow the range while training have dropped their observer."""
    return class_name(type(quantizer.observer or quantizer.new_observer()))


def mismatches(model: nn.Module, task: RowTask, plan: Plan, table: BackendTable, graph: Graph) -> list[str]:
    """The differences between the model and the settings of the row."""
    attachment = attachment_of(model)
    wrong: list[str] = []
    kinds = {True: QUANTIZERS.get(task.algorithm.weights), False: QUANTIZERS.get(task.algorithm.a_method)}
    observers = {True: _asked_observer(task, table, weight=True), False: _asked_observer(task, table, weight=False)}
    bits = _bits(task, plan, table, graph)
    seen: set[bool] = set()
    for site, quantizer in attachment.quantizers.items():
        if quantizer.of:
            continue
        seen.add(quantizer.weight)
        wanted = kinds[quantizer.weight]
        if type(quantizer) is not wanted:
            wrong.append(f"{site}: {class_name(type(quantizer))} runs instead of {class_name(wanted)}")
        if _observer(quantizer) != observers[quantizer.weight]:
            wrong.append(f"{site}: {_observer(quantizer)} set the range instead of {observers[quantizer.weight]}")
        if quantizer.format.bits not in (allowed := bits.get(site, (task.bits,))):
            wrong.append(f"{site}: {quantizer.format.bits} bits, the row has {' or '.join(map(str, allowed))}")
        wrong += _format_problems(model, site, quantizer, plan)
    wrong += [f"no {'weight' if role else 'activation'} is quantized" for role in (True, False) if role not in seen]
    folded = Counter(_STRATEGY_OF[type(fold)] for fold in attachment.folds.values())
    expected = {} if task.bnfold == NO_FOLDING or not table.fold else {task.bnfold: len(plan.folds)}
    if {k: v for k, v in expected.items() if v} != dict(folded):
        wrong.append(f"norms are folded {dict(folded)} (strategy: count), the row has {expected}")
    return wrong


def _asked_observer(task: RowTask, table: BackendTable, *, weight: bool) -> str:
    """The observer of the row; by default mse below 8 bits, and the backend's observer at 8 bits."""
    asked = task.algorithm.weight_observer if weight else task.algorithm.observer
    usual = table.weights.observer if weight else table.activations.observer
    return class_name(OBSERVERS.get(asked or ("mse" if task.bits < 8 else usual)))


def _bits(task: RowTask, plan: Plan, table: BackendTable, graph: Graph) -> dict[str, tuple[int, ...]]:
    """The allowed widths of the first and the last operator with a weight. All other sites have the row's width."""
    asked = task.edges if task.edges is not None and task.bits < task.edges else table.edges
    if asked is None or asked <= task.bits:
        return {}
    found: dict[str, tuple[int, ...]] = {}
    weighted = [op for op in graph.ops if op.site("weight") in plan.sites]
    for op in (*weighted[:1], *weighted[-1:]):
        if (fed := _fed_by(op, plan, graph)) is not None:
            found[fed] = (asked, task.bits)  # a tensor that other operators read too can keep its width
        weight = op.site("weight")
        found[plan.sites[weight].share or weight] = (asked,)
    return found


def _fed_by(op: Op, plan: Plan, graph: Graph) -> str | None:
    """The site that quantizes the input of an operator: its own, or the output of the operator that produces it."""
    port = op.port("input") or op.port("input0")
    while port is not None:
        here = op.site(port.name)
        source = port.sources[0] if len(port.sources) == 1 else None
        before = graph.by_name[source.name] if source is not None and source.kind == "op" else None
        made = "" if before is None else before.site("output")
        if (site := next((s for s in (here, made) if s in plan.sites), None)) is not None:
            return plan.sites[site].share or site
        if before is None:
            return None
        op, port = before, before.port("input") or before.port("input0")
    return None


def _format_problems(model: nn.Module, site: str, quantizer: Quantizer, plan: Plan) -> Iterator[str]:
    """Differences between a quantizer and its format."""
    format = quantizer.format
    if str(plan.sites[site].format) != str(quantizer.spec.format):
        yield f"{site}: {quantizer.spec.format}, the plan has {plan.sites[site].format}"
    most = 2**format.bits
    if quantizer.qmax - quantizer.qmin + 1 > most:
        yield f"{site}: codes {quantizer.qmin} to {quantizer.qmax} in {format}"
    count = levels(model, quantizer)
    if count > most:
        yield f"{site}: {count} different values in {format}"
    scale = quantizer.grid().scale
    if format.granularity == "tensor" and scale.numel() != 1:
        yield f"{site}: {scale.numel()} scales in {format}"
    if format.pot and quantizer.exportable and not bool((torch.log2(scale) == torch.log2(scale).round()).all()):
        yield f"{site}: a scale isn't a power of two in {format}"
    zero_point = quantizer.grid().zero_point
    if format.symmetric and bool((zero_point != 0).any()):
        yield f"{site}: a zero point in {format}"
