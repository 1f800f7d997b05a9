"""What a prepared model really runs, read from the model itself; and whether that is what a row asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from bitwright.attach import Quantizer, attachment_of
from bitwright.attach.folding import BY_STRATEGY
from bitwright.backends import BackendTable
from bitwright.bench.grid import RowTask
from bitwright.graph.naming import SiteName
from bitwright.plan import NO_FOLDING, Plan
from bitwright.registry import QUANTIZERS
from bitwright.report import Executed, Sites

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


def _sites(found: dict[tuple[str, str], list[int]]) -> Iterator[Sites]:
    for (name, format), counts in sorted(found.items()):
        yield Sites(quantizer=name, format=format, sites=len(counts), levels=max(counts))


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


def mismatches(model: nn.Module, task: RowTask, plan: Plan, table: BackendTable) -> list[str]:
    """Where the model does something else than the row says; empty if it doesn't."""
    attachment = attachment_of(model)
    wrong: list[str] = []
    kinds = {True: QUANTIZERS.get(task.algorithm.weights), False: QUANTIZERS.get(task.algorithm.a_method)}
    seen: set[bool] = set()
    for site, quantizer in attachment.quantizers.items():
        if quantizer.of:
            continue
        seen.add(quantizer.weight)
        wanted = kinds[quantizer.weight]
        if type(quantizer) is not wanted:
            wrong.append(f"{site}: {class_name(type(quantizer))} runs instead of {class_name(wanted)}")
        wrong += _format_problems(model, site, quantizer, task, plan)
    wrong += [f"no {'weight' if role else 'activation'} is quantized" for role in (True, False) if role not in seen]
    folded = Counter(_STRATEGY_OF[type(fold)] for fold in attachment.folds.values())
    expected = {} if task.bnfold == NO_FOLDING or not table.fold else {task.bnfold: len(plan.folds)}
    if {k: v for k, v in expected.items() if v} != dict(folded):
        wrong.append(f"norms are folded {dict(folded)} (strategy: how many), the row says {expected}")
    return wrong


def _format_problems(model: nn.Module, site: str, quantizer: Quantizer, task: RowTask, plan: Plan) -> Iterator[str]:
    """Whether state and behaviour are those of the format."""
    format = quantizer.format
    if format.bits not in (task.bits, max(task.bits, task.edges or 0)):
        yield f"{site}: {format.bits} bits, the row says {task.bits}"
    if str(plan.sites[site].format.with_bits(format.bits)) != str(quantizer.spec.format):
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
