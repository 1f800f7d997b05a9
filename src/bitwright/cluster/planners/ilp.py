"""The best formats of one kind of device: integer programs, and decomposition.

Integer programs minimize the penalty or the time, within limits of time and memory. `quickest` finds the fastest
formats by decomposition into blocks of operators with independent costs.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import Any, Literal

import numpy as np

from bitwright.cluster.cost_model import FLOAT, CostModel, too_large
from bitwright.core.errors import PlanError, Problem

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


_TRIES = 6  # true costs aren't sums: the limit is reduced by the excess, up to this number of times
_SECONDS = 5.0  # time limit of one program; the best plan found until then is used


def ilp(
    costs: CostModel,
    kind: str,
    *,
    batch: int | None = None,
    seconds: float | None = None,
    memory: int | None = None,
) -> dict[str, str]:
    """Return the plan with the smallest penalty within limits of work and memory."""
    return Program(costs, kind, batch or costs.batch).solve("penalty", seconds=seconds, memory=memory)


@dataclass(frozen=True)
class Program:
    """The linearized costs of one kind and batch size, to solve for several limits.

    Seconds are sums over operators and over pairs that are joined by casts. Bytes are linearized around the plan
    `around`, by default the smallest plan. A tensor that several float operators read is saved once, so it has its own
    variable. The cost model evaluates each solution; if a limit is exceeded, it is tightened by the excess.
    """

    costs: CostModel
    kind: str
    batch: int
    around: Mapping[str, str] | None = None

    def solve(
        self, least: Literal["penalty", "seconds"], *, seconds: float | None = None, memory: int | None = None
    ) -> dict[str, str]:
        """Return the plan with the smallest penalty or work. If none fits, the error names what is needed."""
        time, memory_limit = seconds, None  # most plans fit, so memory is only included after one doesn't
        for _ in range(_TRIES):
            plan = self._solved(least, time, memory_limit)
            if plan is None:
                break
            late = 0.0 if seconds is None else self.costs.work(self.kind, plan, self.batch) - seconds * (1 + 1e-9)
            over = 0 if memory is None else self.costs.memory(self.kind, plan, self.batch) - memory
            if late <= 0 and over <= 0:
                return plan
            if late > 0 and time is not None:
                time -= late
            if over > 0 and memory is not None:
                memory_limit = memory if memory_limit is None else memory_limit - over
        raise PlanError([self._infeasible(seconds, memory)], title="no plan fits")

    def _solved(
        self, least: Literal["penalty", "seconds"], seconds: float | None, memory: int | None
    ) -> dict[str, str] | None:
        from scipy.optimize import Bounds, LinearConstraint, milp  # imported here because it takes most of a second

        goal = self._penalties if least == "penalty" else self._works + self._prices
        constraints = list(self._structure)
        if seconds is not None:
            constraints.append(LinearConstraint(self._works[None], -np.inf, seconds - self._sampled.base))
        if memory is not None:
            used, own, shared = self._bytes
            constraints = [_wider(one, len(shared)) for one in constraints]
            taken = np.array([*own, *(bytes for _, bytes in shared)])
            constraints += [LinearConstraint(taken[None] / 1e6, -np.inf, (memory - used) / 1e6), *self._kept_for_any]
            goal = np.pad(goal, (0, len(shared)))
        scale = float(np.abs(goal).max()) or 1.0  # the solver's tolerances are absolute
        whole = np.array([float(i < len(self._pairs)) for i in range(len(goal))])
        found = milp(
            goal / scale,
            constraints=constraints,
            integrality=whole,
            bounds=Bounds(0, 1),
            options={"mip_rel_gap": 1e-6, "time_limit": _SECONDS},
        )
        if found.x is None:
            return None
        chosen = zip(self._pairs, found.x[: len(self._pairs)], strict=True)
        return {op: format for (op, format), share in chosen if share > 0.5}

    @cached_property
    def _sampled(self) -> Sampled:
        return sample(self.costs, self.kind, self.batch)

    @cached_property
    def _pairs(self) -> list[tuple[str, str]]:
        return list(self._sampled.single)

    @cached_property
    def _joined(self) -> list[tuple[tuple[str, str], tuple[str, str], float]]:
        """The additional cost of two formats together; its variable is 1 if both operators have these formats."""
        return [
            ((a, f), (b, g), seconds) for (a, b), own in self._sampled.pairs.items() for (f, g), seconds in own.items()
        ]

    @cached_property
    def _penalties(self) -> np.ndarray[Any, Any]:
        own = [self.costs.penalty(op, format) for op, format in self._pairs]
        return np.array([*own, *(0.0 for _ in self._joined)])

    @cached_property
    def _works(self) -> np.ndarray[Any, Any]:
        return np.array([*self._sampled.single.values(), *(seconds for _, _, seconds in self._joined)])

    @cached_property
    def _prices(self) -> np.ndarray[Any, Any]:
        """The minimum gain of a lower format."""
        price = price_of(self.costs, self._sampled)
        return np.array([*(price * (f != FLOAT) for _, f in self._pairs), *(0.0 for _ in self._joined)])

    @cached_property
    def _bytes(self) -> tuple[float, list[float], list[tuple[list[str], float]]]:
        """The bytes of a base plan, those of each variable, and those that groups of readers share in float."""
        used = float(self._memory({}))
        begin, own, shared = used, dict.fromkeys(self._pairs, 0.0), []
        formats = {op: self.costs.formats(self.kind, op) for op in self.costs.operators}
        groups = _groups(self.costs, [op for op, known in formats.items() if FLOAT in known and len(known) > 1])
        for group in groups:
            low = {op: next(f for f in formats[op] if f != FLOAT) for op in group}
            base = float(self._memory(low))
            begin += base - used
            alone = {op: self._memory({**low, op: FLOAT}) - base for op in group}
            # each one alone saves the shared input; together they save it once
            twice = sum(alone.values()) - (self._memory(dict.fromkeys(group, FLOAT)) - base)
            common = max(0.0, twice / (len(group) - 1))
            shared.append((group, common))
            for op in group:
                own.update({(op, f): self._memory({**low, op: f}) - base for f in formats[op] if f != low[op]})
                own[op, FLOAT] = alone[op] - common
        for op, format in self._pairs:
            if not any(op in group for group in groups) and self._near[op] != format:
                own[op, format] = self._memory({op: format}) - used
        return begin, [*own.values(), *(0.0 for _ in self._joined)], shared

    def _memory(self, changed: Mapping[str, str]) -> int:
        return self.costs.memory(self.kind, {**self._near, **changed}, self.batch)

    @cached_property
    def _kept_for_any(self) -> list[Any]:
        """The shared input of a group is saved if any of its operators is in float."""
        from scipy.optimize import LinearConstraint

        shared = self._bytes[2]
        place = {pair: index for index, pair in enumerate(self._pairs)}
        first = len(self._pairs) + len(self._joined)
        rows = []
        for index, (group, _) in enumerate(shared, first):
            for op in group:
                row = np.zeros(first + len(shared))
                row[[place[op, FLOAT], index]] = 1, -1
                rows.append(row)
        return [LinearConstraint(np.array(rows), -np.inf, 0.0)] if rows else []

    @property
    def _near(self) -> Mapping[str, str]:
        return self.smallest if self.around is None else self.around

    @cached_property
    def smallest(self) -> dict[str, str]:
        """The plan with the least memory."""
        return smallest(self.costs, self.kind, self.batch)

    @cached_property
    def _structure(self) -> list[Any]:
        """One format per operator; the variable of a pair is the product of its two formats' variables."""
        from scipy.optimize import LinearConstraint

        place = {pair: index for index, pair in enumerate(self._pairs)}
        operators = list(self.costs.operators)
        row = {op: index for index, op in enumerate(operators)}
        width = len(self._pairs) + len(self._joined)
        one_each = np.zeros((len(operators), width))
        for (op, _), index in place.items():
            one_each[row[op], index] = 1
        found = [LinearConstraint(one_each, 1, 1)]
        rows, upper = [], []
        for index, (a, b, seconds) in enumerate(self._joined, len(self._pairs)):
            both = np.zeros(width)
            both[[place[a], place[b], index]] = 1, 1, -1
            if seconds > 0:  # costs need a lower bound and gains an upper bound
                rows.append(both)
                upper.append(1.0)
                continue
            for one in (a, b):
                under = np.zeros(width)
                under[[index, place[one]]] = 1, -1
                rows.append(under)
                upper.append(0.0)
        if rows:
            found.append(LinearConstraint(np.array(rows), -np.inf, upper))
        return found

    def _infeasible(self, seconds: float | None, memory: int | None) -> Problem:
        if memory is not None and self.costs.memory(self.kind, self.smallest, self.batch) > memory:
            return too_large(self.costs, self.kind, self.smallest, self.batch, memory)
        words = []
        if seconds is not None:
            quick = self._solved("seconds", None, None) or self.smallest
            needs = self.costs.work(self.kind, quick, self.batch)
            words.append(f"needs {needs:.4g} s at its fastest, the limit is {seconds:.4g}")
        if memory is not None:
            needs = self.costs.memory(self.kind, self.smallest, self.batch)
            words.append(f"needs {needs / 1e9:.3g} GB at its smallest, the limit is {memory / 1e9:.3g}")
        return Problem(
            what="; ".join(words),
            where=self.kind,
            fix="raise the limits, or use a smaller batch",
            code="limits-too-low",
        )


def _wider(constraint: Any, columns: int) -> Any:
    """The same constraint with additional variables that it doesn't restrict."""
    from scipy.optimize import LinearConstraint

    return LinearConstraint(np.pad(constraint.A, ((0, 0), (0, columns))), constraint.lb, constraint.ub)


def _groups(costs: CostModel, operators: list[str]) -> list[list[str]]:
    """Groups of two or more operators that read the same tensor."""
    found: list[list[str]] = []
    seen: set[str] = set()
    for operator in operators:
        own = [
            other
            for other in (operator, *costs.shares_input_with(operator))
            if other in operators and other not in seen
        ]
        if operator not in seen and len(own) > 1:
            found.append(own)
            seen.update(own)
    return found


def smallest(costs: CostModel, kind: str, batch: int) -> dict[str, str]:
    """Return the plan with the least memory: start from the best uniform format, and change one operator at a time."""
    formats = {op: costs.formats(kind, op) for op in costs.operators}
    every = dict.fromkeys(f for own in formats.values() for f in own)
    plans = [{op: format if format in own else FLOAT for op, own in formats.items()} for format in every]
    best = min(plans, key=lambda plan: costs.memory(kind, plan, batch), default={})
    used = costs.memory(kind, best, batch)
    for op, own in formats.items():
        for format in own:
            other = {**best, op: format}
            if format != best[op] and (now := costs.memory(kind, other, batch)) < used:
                best, used = other, now
    return best
