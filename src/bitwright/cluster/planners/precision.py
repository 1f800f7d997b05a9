"""Precisions for unequal devices: the fastest plan, and the recovery of whatever need not be low."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from bitwright.cluster.cost_model import FLOAT, Machine, Plans, total_penalty
from bitwright.cluster.planners.blocks import polished, quickest
from bitwright.cluster.planners.explanation import too_large
from bitwright.cluster.planners.ilp import Program, smallest
from bitwright.core.arguments import Positive, Share, strict
from bitwright.core.errors import PlanError, Problem

SLACK = 0.01
"""How much longer than the fastest step a plan may take to be more exact."""
_SEARCHED = 6  # programs for one kind: each halves what isn't known of the work that it may have
Assignment = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """A plan for each kind of device, with what it is expected to be worth."""

    plans: Mapping[str, Mapping[str, str]]
    batches: Mapping[str, int]
    seconds: float
    penalty: float
    memory: Mapping[str, int]

    @property
    def low(self) -> dict[str, int]:
        """How many operators of each kind aren't float."""
        return {kind: sum(f != FLOAT for f in plan.values()) for kind, plan in self.plans.items()}


@strict
def allocation(machine: Machine, plans: Plans, batches: Mapping[str, int]) -> Allocation:
    """What these plans are worth."""
    return Allocation(
        plans={kind: dict(plan) for kind, plan in plans.items()},
        batches=dict(batches),
        seconds=machine.step(plans, batches),
        penalty=total_penalty(machine, plans, batches),
        memory={kind: machine.memory(kind, plan, batches[kind]) for kind, plan in plans.items()},
    )


@strict
def equal_batches(machine: Machine) -> dict[str, int]:
    """The same number of samples everywhere."""
    return dict.fromkeys(machine.kinds, machine.batch)


@strict
def uniform(machine: Machine, format: str, batches: Mapping[str, int] | None = None) -> Allocation:
    """One format wherever it can be run, float elsewhere."""
    batches = batches or equal_batches(machine)
    plans = {
        kind: {op: format if format in machine.formats(kind, op) else FLOAT for op in machine.operators}
        for kind in machine.kinds
    }
    return allocation(machine, plans, batches)


def one_format(machine: Machine) -> Allocation:
    """One format on all kinds: of those that fit the fastest."""
    every = dict.fromkeys(f for kind in machine.kinds for op in machine.operators for f in machine.formats(kind, op))
    found = [uniform(machine, format) for format in every]
    fitting = [one for one in found if not over_limits(machine, one)]
    if not fitting:
        smallest_one = min(found, key=lambda one: max(one.memory.values()))
        raise PlanError(over_limits(machine, smallest_one), title="no plan fits")
    return min(fitting, key=lambda one: one.seconds)


def over_limits(machine: Machine, found: Allocation) -> list[Problem]:
    """What doesn't fit, explained; plans that nobody fitted may need more than there is."""
    return [
        too_large(machine, kind, found.plans[kind], found.batches[kind], limit)
        for kind, used in found.memory.items()
        if (limit := machine.limit(kind)) is not None and used > limit
    ]


@strict
def all_float(machine: Machine) -> Allocation:
    """Everything in float, equal batches: what is there without a plan."""
    return uniform(machine, FLOAT)


def fastest(machine: Machine, batches: Mapping[str, int] | None = None) -> Allocation:
    """Each kind as fast as it can be within its memory; float where a lower format is hardly faster.

    Block by block, memory aside (`blocks.quickest`). What doesn't fit is made smaller where that costs the least time
    for each byte, and around that plan by the integer program: the faster one of both counts.
    """
    batches = batches or equal_batches(machine)
    plans: dict[str, Assignment] = {}
    problems: list[Problem] = []
    for kind in machine.kinds:
        try:
            plans[kind] = _fit(machine, kind, quickest(machine, kind, batches[kind]), batches[kind])
        except PlanError as error:
            problems += error.problems
    if problems:
        raise PlanError(problems, title="no plan fits")
    return allocation(machine, plans, batches)


def _fit(machine: Machine, kind: str, plan: Assignment, batch: int) -> Assignment:
    """Within memory, as fast as can be; a device that can't is explained."""
    limit = machine.limit(kind)
    if limit is None or machine.memory(kind, plan, batch) <= limit:
        return plan
    least = smallest(machine, kind, batch)
    if machine.memory(kind, least, batch) > limit:
        raise PlanError([too_large(machine, kind, least, batch, limit)], title="no plan fits")
    near = _shrunk(machine, kind, plan, batch, limit) or least
    found = [near]
    with suppress(PlanError):  # bytes that are no sum: the program may have tightened its limit too far
        found.append(Program(machine, kind, batch, near).solve("seconds", memory=limit))
    plans = [polished(machine, kind, batch, one, limit=limit) for one in found]
    return min(plans, key=lambda one: machine.work(kind, one, batch))


def _shrunk(machine: Machine, kind: str, plan: Assignment, batch: int, limit: int) -> Assignment | None:
    """Smaller formats until it fits, the cheapest byte first; None where single changes don't lead there.

    What a change saves is asked again before it is made, as others were since; only if it is much less all are.
    """
    used = machine.memory(kind, plan, batch)
    while used > limit:
        options = []
        work = machine.work(kind, plan, batch)
        for operator in machine.operators:
            for format in machine.formats(kind, operator):
                other = {**plan, operator: format}
                saved = used - machine.memory(kind, other, batch)
                if saved > 0:
                    lost = machine.work(kind, other, batch) - work
                    # of what costs nothing the largest; else the least time for each byte
                    options.append((lost / saved if lost > 0 else 0.0, -saved, operator, format))
        if not options:
            return None
        begun = used
        for _, expected, operator, format in sorted(options):
            other = {**plan, operator: format}
            now = machine.memory(kind, other, batch)
            if used - now >= -expected / 2:
                plan, used = other, now
            elif used < begun:
                break
            if used <= limit:
                break
    return plan


@strict
def recover(
    machine: Machine,
    batches: Mapping[str, int] | None = None,
    *,
    start: Allocation | None = None,
    slack: Share = SLACK,
    target: Positive | None = None,
) -> Allocation:
    """Raise operators from the fastest plan, those that training suffers most from first, while nobody waits longer.

    A raise is kept if the device's memory is enough and the cluster's step takes no longer than the target: by default
    that of the fastest plans, and a little. A raise that isn't kept leaves no trace; it is tried again when another one
    made room. In the end each device's plan is exchanged for that of the integer program with as much time and memory,
    where that suffers less: one operator at a time can't find what takes a step back first.
    """
    batches = batches or equal_batches(machine)
    begin = start or fastest(machine, batches)
    plans = {kind: dict(plan) for kind, plan in begin.plans.items()}
    limit = begin.seconds * (1 + slack) if target is None else target
    plans = _climb(machine, plans, batches, limit)
    for kind in plans:
        other = _exchanged(machine, plans, batches, kind, limit)
        if other is not None:
            plans = _climb(machine, {**plans, kind: other}, batches, limit)
    return allocation(machine, plans, batches)


def integer(machine: Machine, *, slack: float = SLACK) -> Allocation:
    """The least penalty by integer programming, within each kind's memory and the fastest step, and a little."""
    batches = equal_batches(machine)
    begin = fastest(machine, batches)
    plans = {kind: dict(plan) for kind, plan in begin.plans.items()}
    for kind in plans:
        plans[kind] = _exchanged(machine, plans, batches, kind, begin.seconds * (1 + slack)) or plans[kind]
    return allocation(machine, plans, batches)


def _exchanged(
    machine: Machine, plans: dict[str, Assignment], batches: Mapping[str, int], kind: str, limit: float
) -> Assignment | None:
    """Another plan that suffers less; as much work as the limit allows, which for one that waits is more than it has.

    How much that is only the cluster's step can say, so it is searched for, between all of it and what is left now.
    """
    plan, batch = plans[kind], batches[kind]
    program = Program(machine, kind, batch, plan)
    before = sum(machine.penalty(op, f) for op, f in plan.items())
    if before == 0:
        return None
    sure, most = machine.work(kind, plan, batch) + max(0.0, limit - machine.step(plans, batches)), limit
    found: Assignment | None = None
    seconds = most
    for _ in range(_SEARCHED):
        other = None
        with suppress(PlanError):  # costs that depend on each other: no plan is as quick as its sum says
            other = program.solve("penalty", seconds=seconds, memory=machine.limit(kind))
        after = before if other is None else sum(machine.penalty(op, f) for op, f in other.items())
        if other is not None and after >= before and seconds == limit:  # even all of it helps nothing
            break
        if other is None:
            most = seconds if seconds > sure else most
        elif after < before and machine.step({**plans, kind: other}, batches) <= limit * (1 + 1e-12):
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
    machine: Machine, plans: dict[str, Assignment], batches: Mapping[str, int], limit: float
) -> dict[str, Assignment]:
    again = True
    while again:
        again = False
        heap = [
            (-machine.kinds[kind] * (batches[kind] ** 2) * machine.penalty(op, format), kind, op)
            for kind, plan in plans.items()
            for op, format in plan.items()
            if format != FLOAT
        ]
        heapq.heapify(heap)
        refused = False
        while heap:
            _, kind, operator = heapq.heappop(heap)
            if plans[kind][operator] == FLOAT:  # with another one already
                continue
            better = _raised(machine, plans, batches, kind, operator, limit)
            if better is None:
                refused = True
                continue
            room = refused and _makes_room(machine, kind, plans[kind], better, batches[kind])
            plans = {**plans, kind: better}
            again = again or room or better[operator] != FLOAT
    return plans


def _makes_room(machine: Machine, kind: str, before: Assignment, after: Assignment, batch: int) -> bool:
    """Whether a raise leaves more time or memory than there was, so that what was refused is worth another try."""
    return machine.memory(kind, after, batch) < machine.memory(kind, before, batch) or (
        machine.work(kind, after, batch) < machine.work(kind, before, batch)
    )


def _raised(
    machine: Machine, plans: dict[str, Assignment], batches: Mapping[str, int], kind: str, operator: str, limit: float
) -> Assignment | None:
    """The device's plan with this operator as exact as time and memory allow; None if it stays as it is.

    Where it doesn't fit alone, it may together with others that read the same: float keeps that once for all of them.
    """
    now = machine.penalty(operator, plans[kind][operator])
    finer = sorted(
        (f for f in machine.formats(kind, operator) if machine.penalty(operator, f) < now),
        key=lambda format: machine.penalty(operator, format),
    )
    most = machine.limit(kind)
    for format in finer:
        plan = {**plans[kind], operator: format}
        if most is not None and machine.memory(kind, plan, batches[kind]) > most:
            plan.update(
                {other: format for other in machine.beside(operator) if _finer(machine, kind, plan, other, format)}
            )
            if machine.memory(kind, plan, batches[kind]) > most:
                continue
        if machine.step({**plans, kind: plan}, batches) <= limit:
            return plan
    return None


def _finer(machine: Machine, kind: str, plan: Assignment, operator: str, format: str) -> bool:
    """Whether an operator can have this format, and suffers less in it than in its own."""
    return format in machine.formats(kind, operator) and (
        machine.penalty(operator, format) < machine.penalty(operator, plan[operator])
    )
