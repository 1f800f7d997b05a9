"""What a prepared model really runs, read from the model itself; and whether that is what a row asked for."""

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
    """Classes, formats in force and levels of all quantizers; how norms are folded."""
    attachment = attachment_of(model)
    found: dict[bool, dict[tuple[str, str], list[int]]] = {True: {}, False: {}}
    biases = 0
    for quantizer in attachment.quantizers.values():
        if quantizer.of:  # made from others: a bias on the accumulator's grid
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
    """A class as an import would name it."""
    return f"{kind.__module__}.{kind.__qualname__}"


@torch.no_grad()
def levels(model: nn.Module, quantizer: Quantizer) -> int:
    """How many different values a quantizer gives, at most, for one of its scales: counted, not computed."""
    if quantizer.weight:
        values: Tensor = getattr(model.get_submodule(SiteName.parse(quantizer.site).path), quantizer.port).detach()
    else:
        # from far inside the range to beyond its ends, dense around zero, where uneven levels are
        end = 2.0 * float(quantizer.scale.abs().max()) * (quantizer.qmax + 1)
        positive = end * torch.cat([torch.linspace(0, 1, _POINTS), torch.logspace(-6, 0, _POINTS)])
        values = torch.cat([-positive, positive])
    given = quantizer.quantize(values.to(torch.float32))
    return max(int(row.unique().numel()) for row in quantizer.layout.rows(given))


def read_observers(model: nn.Module) -> Observers:
    """Classes of the observers that gave ranges."""
    found: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    for quantizer in attachment_of(model).quantizers.values():
        if not quantizer.of:
            found[quantizer.weight][_observer(quantizer)] += 1
    return Observers(weights=dict(sorted(found[True].items())), activations=dict(sorted(found[False].items())))


def _observer(quantizer: Quantizer) -> str:
    """The class that found the range; training lets it go where ranges are followed: what the quantizer makes."""
    return class_name(type(quantizer.observer or quantizer.new_observer()))


def mismatches(model: nn.Module, task: RowTask, plan: Plan, table: BackendTable, graph: Graph) -> list[str]:
    """Where the model does something else than the row says; empty if it doesn't."""
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
            wrong.append(f"{site}: {_observer(quantizer)} gave the range instead of {observers[quantizer.weight]}")
        if quantizer.format.bits not in (allowed := bits.get(site, (task.bits,))):
            wrong.append(f"{site}: {quantizer.format.bits} bits, the row says {' or '.join(map(str, allowed))}")
        wrong += _format_problems(model, site, quantizer, plan)
    wrong += [f"no {'weight' if role else 'activation'} is quantized" for role in (True, False) if role not in seen]
    folded = Counter(_STRATEGY_OF[type(fold)] for fold in attachment.folds.values())
    expected = {} if task.bnfold == NO_FOLDING or not table.fold else {task.bnfold: len(plan.folds)}
    if {k: v for k, v in expected.items() if v} != dict(folded):
        wrong.append(f"norms are folded {dict(folded)} (strategy: how many), the row says {expected}")
    return wrong


def _asked_observer(task: RowTask, table: BackendTable, *, weight: bool) -> str:
    """The class that the row says; where it says none, mse below 8 bits, and the backend's at 8."""
    asked = task.algorithm.weight_observer if weight else task.algorithm.observer
    usual = table.weights.observer if weight else table.activations.observer
    return class_name(OBSERVERS.get(asked or ("mse" if task.bits < 8 else usual)))


def _bits(task: RowTask, plan: Plan, table: BackendTable, graph: Graph) -> dict[str, tuple[int, ...]]:
    """Widths that the first and the last operator with a weight may have; all other sites have the row's."""
    asked = task.edges if task.edges is not None and task.bits < task.edges else table.edges
    if asked is None or asked <= task.bits:
        return {}
    found: dict[str, tuple[int, ...]] = {}
    weighted = [op for op in graph.ops if op.site("weight") in plan.sites]
    for op in (*weighted[:1], *weighted[-1:]):
        if (fed := _fed_by(op, plan, graph)) is not None:
            found[fed] = (asked, task.bits)  # a tensor that others read too may be left as it is
        weight = op.site("weight")
        found[plan.sites[weight].share or weight] = (asked,)
    return found


def _fed_by(op: Op, plan: Plan, graph: Graph) -> str | None:
    """The site whose quantizer makes what an operator reads: its own, or that of the tensor where it was made."""
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
    """Whether state and behaviour are those of the format."""
    format = quantizer.format
    if str(plan.sites[site].format) != str(quantizer.spec.format):
        yield f"{site}: {quantizer.spec.format}, the plan says {plan.sites[site].format}"
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
