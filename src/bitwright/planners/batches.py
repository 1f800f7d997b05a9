"""Unequal batches for unequal devices, alone and together with precisions."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd

from bitwright.planners.allocate import SLACK, Allocation, allocation, equal_batches, fastest, recover
from bitwright.planners.machine import FLOAT, Machine, Plans


def split_batch(machine: Machine, plans: Plans) -> dict[str, int]:
    """Samples for each kind so that all finish at about the same time; their sum over all devices stays.

    One sample after the other goes from the kind that takes longest to the one that would then be least late.
    """
    batches = equal_batches(machine)
    return _balanced(machine, plans, batches)


def _balanced(machine: Machine, plans: Plans, batches: Mapping[str, int]) -> dict[str, int]:
    current, best = dict(batches), dict(batches)
    kinds = machine.kinds

    def slowest(given: Mapping[str, int]) -> float:
        return max(machine.work(kind, plans[kind], given[kind]) for kind in kinds)

    while True:
        giver = max(kinds, key=lambda kind: machine.work(kind, plans[kind], current[kind]))
        options = []
        for taker in kinds:
            if taker == giver:
                continue
            # whole samples on every device of both kinds: the total must not change
            given, taken = _exchange(kinds[giver], kinds[taker])
            moved = {**current, giver: current[giver] - given, taker: current[taker] + taken}
            if moved[giver] >= 1 and _fits(machine, taker, plans, moved):
                options.append((slowest(moved), moved))
        if not options:
            return best
        late, current = min(options, key=lambda option: option[0])
        if late >= slowest(best):
            return best
        best = current


def _exchange(giving: int, taking: int) -> tuple[int, int]:
    """How many samples each device gives and takes so that the sum stays: 2 devices give 3 each to 3 that take 2."""
    common = gcd(giving, taking)
    return taking // common, giving // common


def _fits(machine: Machine, kind: str, plans: Plans, batches: Mapping[str, int]) -> bool:
    limit = machine.limit(kind)
    return limit is None or machine.memory(kind, plans[kind], batches[kind]) <= limit


def dynamic_batching(machine: Machine) -> Allocation:
    """Everything in float; only the batches differ."""
    plans = {kind: dict.fromkeys(machine.operators, FLOAT) for kind in machine.kinds}
    return allocation(machine, plans, split_batch(machine, plans))


def recover_and_split(machine: Machine, *, slack: float = SLACK) -> Allocation:
    """Precisions and batches together: no earlier system has both.

    The fastest plans, with the batches that balance them, set the pace. Then operators are raised within that pace. A
    raise takes time from one kind alone, so batches are balanced again, and again raised, until nothing changes.
    """
    batches = equal_batches(machine)
    quick = fastest(machine, batches)
    batches = split_batch(machine, quick.plans)
    quick = fastest(machine, batches)
    best = recover(machine, batches, start=quick, slack=slack)
    limit = quick.seconds * (1 + slack)
    for _ in range(len(machine.operators)):
        other = _balanced(machine, best.plans, best.batches)
        if other == best.batches:
            return best
        again = recover(machine, other, start=allocation(machine, best.plans, other), target=limit)
        if again.seconds > limit or again.penalty >= best.penalty:
            return best
        best = again
    return best
