"""Planners of batch sizes: unequal batches for unequal devices, alone or together with precisions."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import cache

from bitwright.cluster.cost_model import FLOAT, CostModel, Plans, largest_batch, too_large
from bitwright.cluster.planners.ilp import quickest, smallest
from bitwright.cluster.planners.precision import SLACK, Allocation, allocation, equal_batches, fastest, recover
from bitwright.core.arguments import strict
from bitwright.core.errors import PlanError, Problem

_HALVINGS = 24  # how often the interval of the step time is halved


def split_batch(costs: CostModel, plans: Plans) -> dict[str, int]:
    """Return the batch size of each kind that minimizes the time of the slowest device. The total batch stays the same.

    No kind gets more samples than its memory holds. Bisection finds the shortest time in which the devices can process
    all samples. Devices of one kind have the same batch size.
    """
    kinds = costs.kinds
    total = costs.samples
    most = {kind: (total - sum(kinds.values())) // count + 1 for kind, count in kinds.items()}  # others have one
    caps = {kind: largest_batch(costs, kind, plans[kind], most[kind]) for kind in kinds}
    found = _summing(kinds, caps, total)
    if found is None:
        raise PlanError(_too_many(costs, plans, caps, total), title="no split of the batch fits")

    @cache
    def work(kind: str, batch: int) -> float:
        return costs.work(kind, plans[kind], batch)

    def within(seconds: float) -> dict[str, int]:
        """The largest batch of each kind within this time."""
        sizes = {}
        for kind, cap in caps.items():
            fits, fails = 0, cap + 1
            while fails - fits > 1:
                middle = (fits + fails) // 2
                fits, fails = (middle, fails) if work(kind, middle) <= seconds else (fits, middle)
            sizes[kind] = fits
        return sizes

    def slowest(batches: Mapping[str, int]) -> float:
        return max(work(kind, batch) for kind, batch in batches.items())

    low, high = 0.0, slowest(found)
    for _ in range(_HALVINGS):
        if high - low <= 1e-4 * high:
            break
        middle = (low + high) / 2
        other = _summing(kinds, within(middle), total)
        if other is None:
            low = middle
        else:
            found, high = other, slowest(other)
    return found


def _summing(kinds: Mapping[str, int], most: Mapping[str, int], total: int) -> dict[str, int] | None:
    """Return batch sizes between 1 and `most` whose sum over all devices is `total`; None if that is impossible.

    The reachable sums after each kind are the bits of an integer.
    """
    if min(most.values()) < 1:
        return None
    names = list(kinds)
    reached = [1]
    for kind in names:
        sums, left, step = reached[-1] << kinds[kind], most[kind] - 1, 1
        while left > 0:  # all batch sizes up to the maximum, by doubling
            step = min(step, left)
            sums |= sums << (step * kinds[kind])
            left -= step
            step *= 2
        reached.append(sums & ((1 << (total + 1)) - 1))
    if not reached[-1] >> total & 1:
        return None
    found: dict[str, int] = {}
    for index in range(len(names) - 1, -1, -1):
        kind = names[index]
        batch = next(
            b
            for b in range(most[kind], 0, -1)
            if b * kinds[kind] <= total and reached[index] >> (total - b * kinds[kind]) & 1
        )
        found[kind] = batch
        total -= batch * kinds[kind]
    return {kind: found[kind] for kind in names}


def _too_many(costs: CostModel, plans: Plans, caps: Mapping[str, int], total: int) -> list[Problem]:
    held = sum(count * caps[kind] for kind, count in costs.kinds.items())
    what = (
        f"all devices together hold {held}"
        if held < total
        else "no whole numbers of samples within these limits add up to"
    )
    whole = Problem(
        what=f"{what} of {total} samples" if held < total else f"{what} {total}",
        where="batch",
        value=", ".join(f"{kind} {cap}" for kind, cap in caps.items()),
        fix=f"a smaller --batch: at most {min(held, total - 1) // sum(costs.kinds.values())}; or more memory",
        code="batch-too-large",
    )
    limits = {kind: costs.limit(kind) for kind in costs.kinds}
    none = any(cap == 0 for cap in caps.values())  # on some kind, not even one sample fits
    return [
        *([] if none else [whole]),
        *(
            too_large(costs, kind, plans[kind], costs.batch, limit, split=True)
            for kind, limit in limits.items()
            if limit is not None
            and costs.memory(kind, plans[kind], costs.batch) > limit
            and (caps[kind] == 0 or not none)
        ),
    ]


def dynamic_batching(costs: CostModel) -> Allocation:
    """Return the best split of the batch with all operators in float."""
    plans = {kind: dict.fromkeys(costs.operators, FLOAT) for kind in costs.kinds}
    return allocation(costs, plans, split_batch(costs, plans))


@strict
def recover_and_split(costs: CostModel, *, slack: float = SLACK) -> Allocation:
    """Choose precisions and batch sizes together.

    The fastest plans with balanced batches determine the step time. Then the precision of operators is raised within
    that time. A raise makes one kind slower, so batches are balanced again. Both repeat until nothing changes.
    """
    quick = _paced(costs)
    best = recover(costs, quick.batches, start=quick, slack=slack)
    limit = quick.seconds * (1 + slack)
    for _ in range(len(costs.operators)):
        other = split_batch(costs, best.plans)
        if other == best.batches:
            return best
        again = recover(costs, other, start=allocation(costs, best.plans, other), target=limit)
        if again.seconds > limit or again.penalty >= best.penalty:
            return best
        best = again
    return best


def _paced(costs: CostModel) -> Allocation:
    """Return the fastest plans with balanced batches, from several starting points.

    A memory limit can be met by smaller batches or by smaller formats. So the batch is split for the fastest formats
    and for the smallest ones. Equal batches are a candidate if they fit.
    """
    equal, size = equal_batches(costs), costs.batch
    quick = {kind: quickest(costs, kind, size) for kind in costs.kinds}
    tight = {kind for kind in quick if largest_batch(costs, kind, quick[kind], size) < size}
    starts = [quick]
    if tight:
        starts.append({kind: smallest(costs, kind, size) if kind in tight else quick[kind] for kind in quick})
    found: list[Allocation] = []
    problem: PlanError | None = None
    with suppress(PlanError):
        if sum(count * size for count in costs.kinds.values()) == costs.samples:
            found.append(fastest(costs, equal))
        if found and tight:
            starts.append({kind: dict(plan) for kind, plan in found[0].plans.items()})
    for plans in starts:
        try:
            found.append(fastest(costs, split_batch(costs, plans)))
        except PlanError as error:
            problem = error
    if not found and problem is not None:
        raise problem
    best = min(found, key=lambda one: one.seconds)
    with suppress(PlanError):  # these plans may have a better split
        again = fastest(costs, split_batch(costs, best.plans))
        best = min(best, again, key=lambda one: one.seconds)
    return best
