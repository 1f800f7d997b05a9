"""Precisions for unequal devices: the fastest plan, and the recovery of whatever need not be low."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

from bitwright.errors import PlanError, Problem
from bitwright.planners.ilp import ilp
from bitwright.planners.machine import FLOAT, Machine, Plans, total_penalty

SLACK = 0.01
"""How much longer than the fastest step a plan may take to be more exact."""
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


def allocation(machine: Machine, plans: Plans, batches: Mapping[str, int]) -> Allocation:
    """What these plans are worth."""
    return Allocation(
        plans={kind: dict(plan) for kind, plan in plans.items()},
        batches=dict(batches),
        seconds=machine.step(plans, batches),
        penalty=total_penalty(machine, plans, batches),
        memory={kind: machine.memory(kind, plan, batches[kind]) for kind, plan in plans.items()},
    )


def equal_batches(machine: Machine) -> dict[str, int]:
    """The same number of samples everywhere."""
    return dict.fromkeys(machine.kinds, machine.batch)


def uniform(machine: Machine, format: str, batches: Mapping[str, int] | None = None) -> Allocation:
    """One format wherever it can be run, float elsewhere."""
    batches = batches or equal_batches(machine)
    plans = {
        kind: {op: format if format in machine.formats(kind, op) else FLOAT for op in machine.operators}
        for kind in machine.kinds
    }
    return allocation(machine, plans, batches)


def all_float(machine: Machine) -> Allocation:
    """Everything in float, equal batches: what is there without a plan."""
    return uniform(machine, FLOAT)


def fastest(machine: Machine, batches: Mapping[str, int] | None = None) -> Allocation:
    """Each kind as fast as it can be within its memory; of equally fast plans the most exact.

    Operators are changed one after the other, each to what makes the device's work least with all others as they are,
    until nothing changes: casts between neighbours are in the work, so a change may make another one worthwhile. What
    doesn't fit is then made smaller where that costs the least time for each byte.
    """
    batches = batches or equal_batches(machine)
    plans = {
        kind: _fit(machine, kind, _quickest(machine, kind, batches[kind]), batches[kind]) for kind in machine.kinds
    }
    return allocation(machine, plans, batches)


def _quickest(machine: Machine, kind: str, batch: int) -> Assignment:
    plan: Assignment = dict.fromkeys(machine.operators, FLOAT)
    work = machine.work(kind, plan, batch)
    changed = True
    while changed:
        changed = False
        for operator in machine.operators:
            for format in machine.formats(kind, operator):
                if format == plan[operator]:
                    continue
                other = machine.work(kind, {**plan, operator: format}, batch)
                if other < work * (1 - 1e-9):
                    plan, work, changed = {**plan, operator: format}, other, True
    return plan


def _fit(machine: Machine, kind: str, plan: Assignment, batch: int) -> Assignment:
    """Smaller formats until it fits, the cheapest byte first; all problems of a device that can't are explained."""
    limit = machine.limit(kind)
    used = machine.memory(kind, plan, batch)
    while limit is not None and used > limit:
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
            raise PlanError([_too_large(machine, kind, plan, batch, limit)], title="no plan fits")
        _, saved, operator, format = min(options)
        plan, used = {**plan, operator: format}, used + saved
    return plan


def _too_large(machine: Machine, kind: str, plan: Assignment, batch: int, limit: int) -> Problem:
    used = machine.memory(kind, plan, batch)
    without = {
        operator: used - machine.memory(kind, {op: f for op, f in plan.items() if op != operator}, batch)
        for operator in machine.operators
    }
    largest = sorted(without, key=lambda operator: -without[operator])[:3]
    parts = ", ".join(f"{name} {without[name] / 1e9:.3g} GB" for name in largest)
    return Problem(
        what=f"needs {used / 1e9:.3g} GB with everything as small as it can be, has {limit / 1e9:.3g}",
        where=kind,
        value=f"largest: {parts}",
        fix="a smaller batch for this kind, or more memory",
    )


def recover(
    machine: Machine,
    batches: Mapping[str, int] | None = None,
    *,
    start: Allocation | None = None,
    slack: float = SLACK,
    target: float | None = None,
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


def _exchanged(
    machine: Machine, plans: dict[str, Assignment], batches: Mapping[str, int], kind: str, limit: float
) -> Assignment | None:
    plan, batch = plans[kind], batches[kind]
    left = max(0.0, limit - machine.step(plans, batches))
    try:
        other = ilp(
            machine,
            kind,
            batch=batch,
            seconds=(machine.work(kind, plan, batch) + left) * (1 + 1e-9),
            memory=machine.limit(kind),
        )
    except PlanError:  # costs that depend on each other: the sum of differences is no plan's cost
        return None
    before, after = (sum(machine.penalty(op, f) for op, f in one.items()) for one in (plan, other))
    most = machine.limit(kind)
    fits = most is None or machine.memory(kind, other, batch) <= most
    return other if after < before and fits and machine.step({**plans, kind: other}, batches) <= limit else None


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
        while heap:
            _, kind, operator = heapq.heappop(heap)
            better = _raised(machine, plans, batches, kind, operator, limit)
            if better is not None:
                plans = {**plans, kind: better}
                again = again or better[operator] != FLOAT
    return plans


def _raised(
    machine: Machine, plans: dict[str, Assignment], batches: Mapping[str, int], kind: str, operator: str, limit: float
) -> Assignment | None:
    """The device's plan with this operator as exact as time and memory allow; None if it stays as it is."""
    now = machine.penalty(operator, plans[kind][operator])
    finer = sorted(
        (f for f in machine.formats(kind, operator) if machine.penalty(operator, f) < now),
        key=lambda format: machine.penalty(operator, format),
    )
    most = machine.limit(kind)
    for format in finer:
        plan = {**plans[kind], operator: format}
        if most is not None and machine.memory(kind, plan, batches[kind]) > most:
            continue
        if machine.step({**plans, kind: plan}, batches) <= limit:
            return plan
    return None
