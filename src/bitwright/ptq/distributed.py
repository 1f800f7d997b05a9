"""Calibration in several processes: each observes its own batches, and all get bit-equal grids.

Every process has the same numbers and merges activation ranges with the same arithmetic in the same order. Weights are
equal in all processes, but machines may differ in the last bit, and some batches may not reach a weight. The state of
the first process that observed a weight is therefore sent to all. A failure in one process is sent to all processes
before they would wait for it.
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

TensorRange = tuple[Tensor, Tensor]


ALONE = object()
"""A group that contains only this process and needs no communication."""


def is_distributed(group: Any) -> bool:
    """Whether other processes take part in the calibration."""
    return group is not ALONE and dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """The information that each process sends to the others; it contains no calibration data."""

    batches: int = 0
    sites: dict[str, tuple[torch.Size | None, bool]] = field(default_factory=dict)  # observed shape, is a weight
    problems: list[Problem] = field(default_factory=list)


def make_report(quantizers: Iterable[Quantizer], batches: int) -> RankReport:
    """The report of this process after all its batches."""
    seen = {q.site: (None if q.observer is None else q.observed_shape, q.weight) for q in quantizers if not q.of}
    return RankReport(batches=batches, sites=seen)


def own_ranges(quantizers: Iterable[Quantizer]) -> dict[str, TensorRange]:
    """The activation ranges that this process observed."""
    return {q.site: q.observer.range() for q in quantizers if q.observer is not None and not q.weight}


def send_failure(error: Exception, group: Any) -> None:
    """Send the error to the other processes, which wait for a report."""
    _gather(RankReport(problems=_problems(error)), group)


def exchange(own: RankReport, group: Any) -> list[RankReport]:
    """The reports of all processes, by rank; raises in all of them if one failed or has different sites."""
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
            fix = "use the same plan in every process"
            problems.append(Problem(what=what, where=site, fix=fix, code="ranks-differ"))
    if problems:
        raise PlanError(sorted(problems, key=str), title="processes have different plans")
    return reports


def settle_across_ranks(
    quantizers: list[Quantizer], reports: list[RankReport], own: dict[str, TensorRange], group: Any
) -> list[Problem]:
    """Give all processes the same grids; returns the same problems in all of them."""
    shapes = {site: [report.sites[site][0] for report in reports] for site in reports[0].sites}
    owners = {site: next((r for r, s in enumerate(seen) if s is not None), None) for site, seen in shapes.items()}
    for quantizer in quantizers:  # x @ w: only processes that see the operand know that it is a weight
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
            elif quantizer.site in reached and quantizer.observer is None:  # a weight seen only by other processes
                shape = _first(shapes[quantizer.site])  # allocate state of the right shape; `_give_weights` fills it
                ends = torch.zeros(_rows(quantizer, shape), device=quantizer.scale.device)
                quantizer.update_grid_from(ends, ends, shape)
            else:
                quantizer.update_grid()
        except Exception as error:  # any failure must reach the other processes, which would wait
            problems += _problems(error)
    told = {str(problem): problem for theirs in _gather(problems, group) for problem in theirs}
    if not told:
        _give_weights([q for q in reached.values() if q.weight], owners, group)
    return list(told.values())


def merge_ranges(
    quantizers: list[Quantizer], widths: list[int], own: dict[str, TensorRange], group: Any
) -> dict[str, TensorRange]:
    """Ranges of `widths` rows, merged with one collective: each process fills its own row of a table of zeros.

    The result omits sites that aren't in `own` of any process.
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
    found: dict[str, TensorRange] = {}
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
    """Send the state of each weight from its owner to all processes, with one collective."""
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
            what = "processes observed shapes with different numbers of scales"
            value = [tuple(shape) for shape in seen]
            fix = "use batches of one shape, or granularity tensor"
            found.append(Problem(what=what, where=quantizer.site, value=value, fix=fix, code="ranks-differ"))
    return found


def _problems(error: Exception) -> list[Problem]:
    if isinstance(error, BitwrightError):
        return error.problems
    return [Problem(what=f"{type(error).__name__}: {error}", code="calibration-failed")]


def _rows(quantizer: Quantizer, shape: torch.Size) -> int:
    return quantizer.layout.rows(torch.empty(shape, device="meta")).shape[0]


def _first(shapes: list[torch.Size | None]) -> torch.Size:
    return next(shape for shape in shapes if shape is not None)


def _gather(own: Any, group: Any) -> list[Any]:
    everybody: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everybody, own, group=group)
    return everybody
