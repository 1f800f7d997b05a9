"""Calibration by several processes: each observes batches of its own, and all end with bit-equal grids.

Ranges of activations are merged as their observers say, from numbers that all processes have, by the same arithmetic in
the same order. Weights are the same everywhere; still, what the first process made of one is given to all, as machines
may differ in a last bit, and a process whose batches didn't reach a weight has none. Whatever goes wrong in one process
is told to all before they would wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bitwright.core.errors import BitwrightError, PlanError, Problem
from bitwright.core.registry import OBSERVERS
from bitwright.quantizers import Quantizer

Range = tuple[Tensor, Tensor]


ALONE = object()
"""A group of this process alone, which nobody else has to know of."""


def several(group: Any) -> bool:
    """Whether there are other processes to calibrate with."""
    return group is not ALONE and dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


@dataclass(frozen=True, kw_only=True)
class Report:
    """What one process tells the others: small, and no numbers of the data."""

    batches: int = 0
    sites: dict[str, tuple[torch.Size | None, bool]] = field(default_factory=dict)  # shape seen, is it a weight
    problems: list[Problem] = field(default_factory=list)  # none: all went well


def describe(quantizers: Iterable[Quantizer], batches: int) -> Report:
    """This process's report when its batches have passed."""
    seen = {q.site: (None if q.observer is None else q.observed_shape, q.weight) for q in quantizers if not q.of}
    return Report(batches=batches, sites=seen)


def own_ranges(quantizers: Iterable[Quantizer]) -> dict[str, Range]:
    """What this process has seen of activations."""
    return {q.site: q.observer.range() for q in quantizers if q.observer is not None and not q.weight}


def give_up(error: Exception, group: Any) -> None:
    """Tell the others, who wait for this process's report, that there won't be one."""
    _gather(Report(problems=_problems(error)), group)


def exchange(own: Report, group: Any) -> list[Report]:
    """The reports of all processes, by rank; an error on each of them if any has failed or has other sites."""
    reports = _gather(own, group)
    problems = [
        replace(problem, where=f"rank {rank}" + (f", {problem.where}" if problem.where else ""))
        for rank, report in enumerate(reports)
        for problem in report.problems
    ]
    if problems:
        raise PlanError(problems, title="calibration failed in another process")
    first = reports[0].sites
    for rank, report in enumerate(reports):
        for site in first.keys() ^ report.sites.keys():
            what = f"only one of rank 0 and rank {rank} has a quantizer here"
            problems.append(Problem(what=what, where=site, fix="give every process the same plan"))
    if problems:
        raise PlanError(sorted(problems, key=str), title="processes have different plans")
    return reports


def settle_together(
    quantizers: list[Quantizer], reports: list[Report], own: dict[str, Range], group: Any
) -> list[Problem]:
    """Settle all quantizers to the same grids in all processes; the same problems come back in all of them."""
    shapes = {site: [report.sites[site][0] for report in reports] for site in reports[0].sites}
    owners = {site: next((r for r, s in enumerate(seen) if s is not None), None) for site, seen in shapes.items()}
    for quantizer in quantizers:  # x @ w: only who sees the operand knows that it is a weight
        quantizer.weight = quantizer.weight or any(r.sites.get(quantizer.site, (None, False))[1] for r in reports)
    problems = _unequal_rows(quantizers, shapes)
    if problems:
        return problems
    reached = {q.site: q for q in quantizers if not q.of and owners[q.site] is not None}
    active = [q for q in reached.values() if not q.weight]
    merged = merge_ranges(active, [_rows(q, _first(shapes[q.site])) for q in active], own, group)
    for quantizer in quantizers:
        try:
            if quantizer.site in merged:
                quantizer.update_grid_from(*merged[quantizer.site], _first(shapes[quantizer.site]))
            elif quantizer.site in reached and quantizer.observer is None:  # a weight that only others have seen:
                shape = _first(shapes[quantizer.site])  # state of the right shapes, to be filled below
                ends = torch.zeros(_rows(quantizer, shape), device=quantizer.scale.device)
                quantizer.update_grid_from(ends, ends, shape)
            else:
                quantizer.update_grid()
        except Exception as error:  # whatever it is, the others must not wait for this process
            problems += _problems(error)
    told = {str(problem): problem for theirs in _gather(problems, group) for problem in theirs}
    if not told:
        _give_weights([q for q in reached.values() if q.weight], owners, group)
    return list(told.values())


def merge_ranges(quantizers: list[Quantizer], widths: list[int], own: dict[str, Range], group: Any) -> dict[str, Range]:
    """Ranges of `widths` rows, merged by one collective: every process fills its row and adds zeros to others.

    A site that no process has in `own` isn't in the result.
    """
    if not widths:
        return {}
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    table = torch.zeros(size, sum(2 * width + 1 for width in widths), device=quantizers[0].scale.device)
    columns = list(table.split([2 * width + 1 for width in widths], dim=1))
    for quantizer, column in zip(quantizers, columns, strict=True):
        if quantizer.site in own:
            column[rank, :-1] = torch.cat(own[quantizer.site])
            column[rank, -1] = 1.0
    dist.all_reduce(table, group=group)
    found: dict[str, Range] = {}
    for quantizer, column, width in zip(quantizers, columns, widths, strict=True):
        seen = column[:, -1] == 1.0
        if not bool(seen.any()):
            continue
        low, high = column[seen, :-1].split(width, dim=1)
        if OBSERVERS.get(quantizer.spec.observer).merge == "extremes":
            found[quantizer.site] = low.amin(dim=0), high.amax(dim=0)
        else:
            found[quantizer.site] = low.double().mean(dim=0).float(), high.double().mean(dim=0).float()
    return found


def _give_weights(quantizers: list[Quantizer], owners: dict[str, int | None], group: Any) -> None:
    """Everybody takes the state that the first process with this weight has; by one collective."""
    if not quantizers:
        return
    rank = dist.get_rank(group)
    states = [quantizer.state_dict() for quantizer in quantizers]
    parts = [
        tensor.reshape(-1) if owners[quantizer.site] == rank else torch.zeros_like(tensor).reshape(-1)
        for quantizer, state in zip(quantizers, states, strict=True)
        for tensor in state.values()
    ]
    flat = torch.cat(parts)
    dist.all_reduce(flat, group=group)
    given = iter(flat.split([part.numel() for part in parts]))
    for quantizer, state in zip(quantizers, states, strict=True):
        quantizer.load_state_dict({name: next(given).reshape(tensor.shape) for name, tensor in state.items()})


def _unequal_rows(quantizers: list[Quantizer], shapes: dict[str, list[torch.Size | None]]) -> list[Problem]:
    found = []
    for quantizer in quantizers:
        seen = [shape for shape in shapes.get(quantizer.site, []) if shape is not None]
        if len({_rows(quantizer, shape) for shape in seen}) > 1:
            what = "processes saw shapes with different numbers of scales"
            value = [tuple(shape) for shape in seen]
            found.append(
                Problem(what=what, where=quantizer.site, value=value, fix="use batches of one shape, or tensor")
            )
    return found


def _problems(error: Exception) -> list[Problem]:
    if isinstance(error, BitwrightError):
        return error.problems
    return [Problem(what=f"{type(error).__name__}: {error}")]


def _rows(quantizer: Quantizer, shape: torch.Size) -> int:
    return quantizer.layout.rows(torch.empty(shape, device="meta")).shape[0]


def _first(shapes: list[torch.Size | None]) -> torch.Size:
    return next(shape for shape in shapes if shape is not None)


def _gather(own: Any, group: Any) -> list[Any]:
    everybody: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everybody, own, group=group)
    return everybody
