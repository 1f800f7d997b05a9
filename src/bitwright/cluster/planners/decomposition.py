"""The fastest formats of one kind of device, by decomposition into blocks of operators with independent costs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from bitwright.cluster.cost_model import FLOAT, CostModel

MARGIN = 0.005
"""The minimum gain of lowering all operators, split equally among them. Smaller gains are within the profile error."""
_NOTHING = 1e-7  # relative to the device's work; smaller differences are rounding errors

Pair = tuple[str, str]


@dataclass(frozen=True)
class Sampled:
    """Seconds of a step as a sum: all operators in float, the change by each operator, and the change by each pair."""

    base: float
    single: Mapping[Pair, float]
    """By (operator, format)."""
    pairs: Mapping[Pair, Mapping[Pair, float]]
    """By (operator, later operator), then by both formats. Independent pairs are omitted."""

    def seconds(self, plan: Mapping[str, str]) -> float:
        """The sum for one plan; it is exact unless three operators depend on each other."""
        alone = sum(self.single[item] for item in plan.items())
        joined = sum(own.get((plan[a], plan[b]), 0.0) for (a, b), own in self.pairs.items())
        return self.base + alone + joined


def sample(costs: CostModel, kind: str, batch: int) -> Sampled:
    """Sample the differences from float, once for equal operators and pairs."""
    order = list(costs.operators)
    place = {operator: index for index, operator in enumerate(order)}
    alike = [costs.cost_key(kind, operator) for operator in order]
    floats = dict.fromkeys(order, FLOAT)
    base = costs.work(kind, floats, batch)
    known: dict[Hashable, float] = {}

    def added(changed: Mapping[str, str]) -> float:
        first, last = (pick(place[operator] for operator in changed) for pick in (min, max))
        formats = tuple((place[operator] - first, format) for operator, format in changed.items())
        around = alike[max(0, first - 1) : last + 2]  # neighbours may need a cast
        key = (tuple(around), first == 0, last + 1 == len(order), formats)
        if key not in known:
            known[key] = costs.work(kind, {**floats, **changed}, batch) - base
        return known[key]

    single = {
        (operator, format): 0.0 if format == FLOAT else added({operator: format})
        for operator in order
        for format in costs.formats(kind, operator)
    }
    pairs: dict[Pair, dict[Pair, float]] = {}
    for operator in order:
        for before in costs.reads(operator):
            options = product(costs.formats(kind, before), costs.formats(kind, operator))
            own = {
                (f, g): added({before: f, operator: g}) - single[before, f] - single[operator, g]
                for f, g in options
                if FLOAT not in (f, g)
            }
            own = {formats: seconds for formats, seconds in own.items() if abs(seconds) > _NOTHING * base}
            if own:
                pairs[before, operator] = own
    return Sampled(base, single, pairs)


def price_of(costs: CostModel, sampled: Sampled) -> float:
    """Seconds that an operator must gain before its precision is lowered."""
    return MARGIN * sampled.base / max(1, len(costs.operators))


_ENUMERATED = 64  # maximum number of plans of a block that are enumerated; larger blocks use dynamic programming
_STATES = 512  # maximum number of states in dynamic programming; the fastest are kept


def blocks(order: Sequence[str], sampled: Sampled) -> list[list[str]]:
    """Split the operators, in order, wherever no dependent pair crosses the cut."""
    place = {operator: index for index, operator in enumerate(order)}
    reach = list(range(len(order)))
    for before, after in sampled.pairs:
        reach[place[before]] = max(reach[place[before]], place[after])
    found: list[list[str]] = []
    last = -1
    for index, operator in enumerate(order):
        if index > last:
            found.append([])
        found[-1].append(operator)
        last = max(last, reach[index])
    return found


def quickest(costs: CostModel, kind: str, batch: int) -> dict[str, str]:
    """Return the fastest plan without a memory limit; float where a lower format is hardly faster.

    Sampled costs show which operators depend on each other. All plans of a small block are evaluated with the cost
    model; large blocks use dynamic programming. Equal blocks have one solution. At the end, single changes are tried on
    the whole plan, because three operators may also depend on each other.
    """
    sampled = sample(costs, kind, batch)
    price = price_of(costs, sampled)
    answers: dict[Hashable, list[str]] = {}
    plan: dict[str, str] = {}
    for block in blocks(costs.operators, sampled):
        place = {operator: index for index, operator in enumerate(block)}
        inner = [(place[a], place[b], tuple(own.items())) for (a, b), own in sampled.pairs.items() if a in place]
        alike = (tuple(costs.cost_key(kind, operator) for operator in block), tuple(inner))
        if alike not in answers:
            answers[alike] = _answer(costs, kind, batch, block, sampled, price)
        plan.update(zip(block, answers[alike], strict=True))
    if sampled.pairs:
        plan = polished(costs, kind, batch, plan)
    return plan if _priced(costs, kind, batch, plan, price) < sampled.base else dict.fromkeys(plan, FLOAT)


def _answer(costs: CostModel, kind: str, batch: int, block: Sequence[str], sampled: Sampled, price: float) -> list[str]:
    formats = [costs.formats(kind, operator) for operator in block]
    if len(block) > 2 and prod(map(len, formats)) <= _ENUMERATED:
        floats = dict.fromkeys(costs.operators, FLOAT)
        plans = [dict(zip(block, choice, strict=True)) for choice in product(*formats)]
        best = min(plans, key=lambda plan: _priced(costs, kind, batch, {**floats, **plan}, price))
        return list(best.values())
    return _in_order(block, formats, sampled, price)


def _in_order(block: Sequence[str], formats: Sequence[Sequence[str]], sampled: Sampled, price: float) -> list[str]:
    """Dynamic programming: for each choice of formats at the frontier, keep the fastest earlier plan."""
    place = {operator: index for index, operator in enumerate(block)}
    earlier: list[list[int]] = [[] for _ in block]
    needed = list(range(len(block)))
    for a, b in sampled.pairs:
        if a in place:
            earlier[place[b]].append(place[a])
            needed[place[a]] = max(needed[place[a]], place[b])
    states: dict[tuple[str, ...], tuple[float, list[str]]] = {(): (0.0, [])}
    for index, operator in enumerate(block):
        frontier = [i for i in range(index + 1) if needed[i] > index]
        following: dict[tuple[str, ...], tuple[float, list[str]]] = {}
        for seconds, chosen in states.values():
            for format in formats[index]:
                now = seconds + sampled.single[operator, format] + (price if format != FLOAT else 0.0)
                for i in earlier[index]:
                    now += sampled.pairs[block[i], operator].get((chosen[i], format), 0.0)
                taken = [*chosen, format]
                key = tuple(taken[i] for i in frontier)
                if key not in following or now < following[key][0]:
                    following[key] = (now, taken)
        states = dict(sorted(following.items(), key=lambda item: item[1][0])[:_STATES])
    return min(states.values(), key=lambda state: state[0])[1]


def _priced(costs: CostModel, kind: str, batch: int, plan: Mapping[str, str], price: float) -> float:
    return costs.work(kind, plan, batch) + price * sum(format != FLOAT for format in plan.values())


def polished(
    costs: CostModel, kind: str, batch: int, plan: dict[str, str], *, limit: int | None = None
) -> dict[str, str]:
    """Apply single changes, the largest gain first, while they reduce the work and the memory limit holds."""
    price = price_of(costs, sample(costs, kind, batch))
    best = _priced(costs, kind, batch, plan, price)
    changed = True
    while changed:
        changed = False
        options = [(op, format) for op in costs.operators for format in costs.formats(kind, op)]
        gains = {(op, f): best - _priced(costs, kind, batch, {**plan, op: f}, price) for op, f in options}
        for op, format in sorted(options, key=lambda option: -gains[option]):
            if gains[op, format] <= 1e-9 * best:
                break
            other = {**plan, op: format}
            seconds = _priced(costs, kind, batch, other, price)
            if seconds < best * (1 - 1e-9) and (limit is None or costs.memory(kind, other, batch) <= limit):
                plan, best, changed = other, seconds, True
    return plan
