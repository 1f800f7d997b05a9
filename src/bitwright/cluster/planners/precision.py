"""Planners of precisions: the fastest plan, and the plan with the smallest penalty that is as fast."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from bitwright.cluster.cost_model import FLOAT, CostModel, Plans, too_large, total_penalty
from bitwright.cluster.planners.ilp import Program, polished, quickest, smallest
from bitwright.core.arguments import Positive, Share, strict
from bitwright.core.errors import PlanError, Problem

SLACK = 0.01
"""The relative increase of the fastest step time that a plan with a smaller penalty may have."""
_SEARCHED = 6  # integer programs for one kind; each halves the interval of its time budget
Assignment = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """A plan for each kind of device, with its predicted time, memory and penalty."""

    plans: Mapping[str, Mapping[str, str]]
    batches: Mapping[str, int]
    seconds: float
    penalty: float
    memory: Mapping[str, int]

    @property
    def low(self) -> dict[str, int]:
        """The number of low-precision operators on each kind of device."""
        return {kind: sum(f != FLOAT for f in plan.values()) for kind, plan in self.plans.items()}


@strict
def allocation(costs: CostModel, plans: Plans, batches: Mapping[str, int]) -> Allocation:
    """Predict the time, memory and penalty of plans."""
    return Allocation(
        plans={kind: dict(plan) for kind, plan in plans.items()},
        batches=dict(batches),
        seconds=costs.step(plans, batches),
        penalty=total_penalty(costs, plans, batches),
        memory={kind: costs.memory(kind, plan, batches[kind]) for kind, plan in plans.items()},
    )


@strict
def equal_batches(costs: CostModel) -> dict[str, int]:
    """Return the same batch size for all kinds."""
    return dict.fromkeys(costs.kinds, costs.batch)


@strict
def uniform(costs: CostModel, format: str, batches: Mapping[str, int] | None = None) -> Allocation:
    """Use one format wherever an operator supports it, and float elsewhere."""
    batches = batches or equal_batches(costs)
    plans = {
        kind: {op: format if format in costs.formats(kind, op) else FLOAT for op in costs.operators}
        for kind in costs.kinds
    }
    return allocation(costs, plans, batches)


def one_format(costs: CostModel) -> Allocation:
    """Return the fastest uniform format that fits."""
    every = dict.fromkeys(f for kind in costs.kinds for op in costs.operators for f in costs.formats(kind, op))
    found = [uniform(costs, format) for format in every]
    fitting = [one for one in found if not over_limits(costs, one)]
    if not fitting:
        smallest_one = min(found, key=lambda one: max(one.memory.values()))
        raise PlanError(over_limits(costs, smallest_one), title="no plan fits")
    return min(fitting, key=lambda one: one.seconds)


def over_limits(costs: CostModel, found: Allocation) -> list[Problem]:
    """Return a problem for each device whose memory limit the plan exceeds."""
    return [
        too_large(costs, kind, found.plans[kind], found.batches[kind], limit)
        for kind, used in found.memory.items()
        if (limit := costs.limit(kind)) is not None and used > limit
    ]


@strict
def all_float(costs: CostModel) -> Allocation:
    """Return the plan with everything in float and equal batches."""
    return uniform(costs, FLOAT)


def fastest(costs: CostModel, batches: Mapping[str, int] | None = None) -> Allocation:
    """Return the fastest plan of each kind within its memory limit; float where a lower format is hardly faster.

    It first optimizes block by block without the limit (`blocks.quickest`). If the result doesn't fit, a greedy search
    (least time per byte) and an integer program around its result reduce the memory; the faster plan is used.
    """
    batches = batches or equal_batches(costs)
    plans: dict[str, Assignment] = {}
    problems: list[Problem] = []
    for kind in costs.kinds:
        try:
            plans[kind] = _fit(costs, kind, quickest(costs, kind, batches[kind]), batches[kind])
        except PlanError as error:
            problems += error.problems
    if problems:
        raise PlanError(problems, title="no plan fits")
    return allocation(costs, plans, batches)


def _fit(costs: CostModel, kind: str, plan: Assignment, batch: int) -> Assignment:
    """Return the fastest plan within the memory limit; raise if none fits."""
    limit = costs.limit(kind)
    if limit is None or costs.memory(kind, plan, batch) <= limit:
        return plan
    least = smallest(costs, kind, batch)
    if costs.memory(kind, least, batch) > limit:
        raise PlanError([too_large(costs, kind, least, batch, limit)], title="no plan fits")
    near = _shrunk(costs, kind, plan, batch, limit) or least
    found = [near]
    with suppress(PlanError):  # memory isn't additive, so the program may have tightened its limit too far
        found.append(Program(costs, kind, batch, near).solve("seconds", memory=limit))
    plans = [polished(costs, kind, batch, one, limit=limit) for one in found]
    return min(plans, key=lambda one: costs.work(kind, one, batch))


def _shrunk(costs: CostModel, kind: str, plan: Assignment, batch: int, limit: int) -> Assignment | None:
    """Reduce formats until the plan fits, least time per byte first; None if single changes don't suffice.

    The saving of a change is computed again before it is applied, because earlier changes affect it. If it is much
    smaller than expected, all savings are computed again.
    """
    used = costs.memory(kind, plan, batch)
    while used > limit:
        options = []
        work = costs.work(kind, plan, batch)
        for operator in costs.operators:
            for format in costs.formats(kind, operator):
                other = {**plan, operator: format}
                saved = used - costs.memory(kind, other, batch)
                if saved > 0:
                    lost = costs.work(kind, other, batch) - work
                    # free changes first, the largest saving first; otherwise the least time per byte
                    options.append((lost / saved if lost > 0 else 0.0, -saved, operator, format))
        if not options:
            return None
        begun = used
        for _, expected, operator, format in sorted(options):
            other = {**plan, operator: format}
            now = costs.memory(kind, other, batch)
            if used - now >= -expected / 2:
                plan, used = other, now
            elif used < begun:
                break
            if used <= limit:
                break
    return plan


@strict
def recover(
    costs: CostModel,
    batches: Mapping[str, int] | None = None,
    *,
    start: Allocation | None = None,
    slack: Share = SLACK,
    target: Positive | None = None,
) -> Allocation:
    """Raise the precision of operators of the fastest plan, largest penalty first, without slowing the step.

    A raise is kept if the device has enough memory and the cluster's step takes no longer than the target, by default
    the time of the fastest plans plus `slack`. A rejected raise is tried again after another one frees time or memory.
    Finally an integer program with the same time and memory replaces a device's plan if its penalty is smaller; raising
    single operators can't find plans that lower another operator first.
    """
    batches = batches or equal_batches(costs)
    begin = start or fastest(costs, batches)
    plans = {kind: dict(plan) for kind, plan in begin.plans.items()}
    limit = begin.seconds * (1 + slack) if target is None else target
    plans = _climb(costs, plans, batches, limit)
    for kind in plans:
        other = _exchanged(costs, plans, batches, kind, limit)
        if other is not None:
            plans = _climb(costs, {**plans, kind: other}, batches, limit)
    return allocation(costs, plans, batches)


def integer(costs: CostModel, *, slack: float = SLACK) -> Allocation:
    """Minimize the penalty by integer programming, within the memory limits and the fastest step time plus `slack`."""
    batches = equal_batches(costs)
    begin = fastest(costs, batches)
    plans = {kind: dict(plan) for kind, plan in begin.plans.items()}
    for kind in plans:
        plans[kind] = _exchanged(costs, plans, batches, kind, begin.seconds * (1 + slack)) or plans[kind]
    return allocation(costs, plans, batches)


def _exchanged(
    costs: CostModel, plans: dict[str, Assignment], batches: Mapping[str, int], kind: str, limit: float
) -> Assignment | None:
    """Return a plan with a smaller penalty whose step stays within the limit; None if there is none.

    A device that waits for others has spare time. Its amount follows only from the cluster's step and is searched.
    """
    plan, batch = plans[kind], batches[kind]
    program = Program(costs, kind, batch, plan)
    before = sum(costs.penalty(op, f) for op, f in plan.items())
    if before == 0:
        return None
    sure, most = costs.work(kind, plan, batch) + max(0.0, limit - costs.step(plans, batches)), limit
    found: Assignment | None = None
    seconds = most
    for _ in range(_SEARCHED):
        other = None
        with suppress(PlanError):  # costs depend on each other, so that no plan may be as fast as the sum says
            other = program.solve("penalty", seconds=seconds, memory=costs.limit(kind))
        after = before if other is None else sum(costs.penalty(op, f) for op, f in other.items())
        if other is not None and after >= before and seconds == limit:  # even the whole step time doesn't help
            break
        if other is None:
            most = seconds if seconds > sure else most
        elif after < before and costs.step({**plans, kind: other}, batches) <= limit * (1 + 1e-12):
            found, before, sure = other, after, seconds
        elif after < before:
            most = seconds
        else:
            sure = seconds
        if most - sure <= 1e-3 * limit:
            break
        seconds = sure if seconds == limit else (sure + most) / 2
    return found


def _climb(
    costs: CostModel, plans: dict[str, Assignment], batches: Mapping[str, int], limit: float
) -> dict[str, Assignment]:
    again = True
    while again:
        again = False
        heap = [
            (-costs.kinds[kind] * (batches[kind] ** 2) * costs.penalty(op, format), kind, op)
            for kind, plan in plans.items()
            for op, format in plan.items()
            if format != FLOAT
        ]
        heapq.heapify(heap)
        refused = False
        while heap:
            _, kind, operator = heapq.heappop(heap)
            if plans[kind][operator] == FLOAT:  # already raised together with another operator
                continue
            better = _raised(costs, plans, batches, kind, operator, limit)
            if better is None:
                refused = True
                continue
            retry = refused and _frees_resources(costs, kind, plans[kind], better, batches[kind])
            plans = {**plans, kind: better}
            again = again or retry or better[operator] != FLOAT
    return plans


def _frees_resources(costs: CostModel, kind: str, before: Assignment, after: Assignment, batch: int) -> bool:
    """Whether a raise frees time or memory, so that rejected raises are worth another try."""
    return costs.memory(kind, after, batch) < costs.memory(kind, before, batch) or (
        costs.work(kind, after, batch) < costs.work(kind, before, batch)
    )


def _raised(
    costs: CostModel,
    plans: dict[str, Assignment],
    batches: Mapping[str, int],
    kind: str,
    operator: str,
    limit: float,
) -> Assignment | None:
    """Return the plan with this operator as exact as time and memory allow; None if it can't be raised.

    If it doesn't fit alone, raise it together with the operators that share its input, which float saves only once.
    """
    now = costs.penalty(operator, plans[kind][operator])
    finer = sorted(
        (f for f in costs.formats(kind, operator) if costs.penalty(operator, f) < now),
        key=lambda format: costs.penalty(operator, format),
    )
    most = costs.limit(kind)
    for format in finer:
        plan = {**plans[kind], operator: format}
        if most is not None and costs.memory(kind, plan, batches[kind]) > most:
            plan.update(
                {
                    other: format
                    for other in costs.shares_input_with(operator)
                    if _finer(costs, kind, plan, other, format)
                }
            )
            if costs.memory(kind, plan, batches[kind]) > most:
                continue
        if costs.step({**plans, kind: plan}, batches) <= limit:
            return plan
    return None


def _finer(costs: CostModel, kind: str, plan: Assignment, operator: str, format: str) -> bool:
    """Whether an operator supports this format with a smaller penalty than its current one."""
    return format in costs.formats(kind, operator) and (
        costs.penalty(operator, format) < costs.penalty(operator, plan[operator])
    )
