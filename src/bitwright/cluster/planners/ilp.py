"""Precisions of one kind of device by integer programming: least penalty, or least time, within memory and time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from bitwright.cluster.cost_model import FLOAT, CostModel, too_large
from bitwright.cluster.planners.blocks import Sampled, price_of, sample
from bitwright.core.errors import PlanError, Problem

_TRIES = 6  # sums are no plan's true cost: what exceeds a limit is taken off it, so often
_SECONDS = 5.0  # for one program; the best plan until then counts


def ilp(
    costs: CostModel,
    kind: str,
    *,
    batch: int | None = None,
    seconds: float | None = None,
    memory: int | None = None,
) -> dict[str, str]:
    """The plan with the least penalty whose work and memory stay within what is given."""
    return Program(costs, kind, batch or costs.batch).solve("penalty", seconds=seconds, memory=memory)


@dataclass(frozen=True)
class Program:
    """The costs of one kind and batch as sums, to solve for several limits.

    Seconds are sums over operators and over pairs that casts join. Bytes are counted from the plan `around` (the
    smallest one, if none is known that fits): they are sums only near a plan. What several operators read is kept once
    for those in float, so it has a variable of its own. A plan's true cost may be another one: it is asked of the
    machine, and the limit tightened by what exceeds it.
    """

    costs: CostModel
    kind: str
    batch: int
    around: Mapping[str, str] | None = None

    def solve(
        self, least: Literal["penalty", "seconds"], *, seconds: float | None = None, memory: int | None = None
    ) -> dict[str, str]:
        """The plan with the least penalty or work; raises with what it would take, if nothing is within the limits."""
        time, memory_limit = seconds, None  # most plans fit: memory is only looked at when one doesn't
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
        from scipy.optimize import Bounds, LinearConstraint, milp  # most of a second; only planners wait for it

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
        scale = float(np.abs(goal).max()) or 1.0  # tolerances are absolute
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
        """What two operators add together: each has a variable that is 1 where both have these formats."""
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
        """What a lower format must gain at least."""
        price = price_of(self.costs, self._sampled)
        return np.array([*(price * (f != FLOAT) for _, f in self._pairs), *(0.0 for _ in self._joined)])

    @cached_property
    def _bytes(self) -> tuple[float, list[float], list[tuple[list[str], float]]]:
        """Of a plan to begin with; what each variable adds; and what those that read the same keep for all in float."""
        used = float(self._memory({}))
        begin, own, shared = used, dict.fromkeys(self._pairs, 0.0), []
        formats = {op: self.costs.formats(self.kind, op) for op in self.costs.operators}
        groups = _groups(self.costs, [op for op, known in formats.items() if FLOAT in known and len(known) > 1])
        for group in groups:
            low = {op: next(f for f in formats[op] if f != FLOAT) for op in group}
            base = float(self._memory(low))
            begin += base - used
            alone = {op: self._memory({**low, op: FLOAT}) - base for op in group}
            # alone each one brings what they read; together they do so once
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
        """What a group reads is kept where any of it is in float."""
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
        """As few bytes as one gets by changing operators one after the other."""
        return smallest(self.costs, self.kind, self.batch)

    @cached_property
    def _structure(self) -> list[Any]:
        """One format for each operator; a pair's variable is what its two say."""
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
            if seconds > 0:  # a cost is avoided where it can be, a gain is taken: one direction each must be said
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
            words.append(f"needs {needs:.4g} s at its fastest, {seconds:.4g} are allowed")
        if memory is not None:
            needs = self.costs.memory(self.kind, self.smallest, self.batch)
            words.append(f"needs {needs / 1e9:.3g} GB at its smallest, {memory / 1e9:.3g} are allowed")
        return Problem(what="; ".join(words), where=self.kind, fix="allow more, or give it a smaller batch")


def _wider(constraint: Any, columns: int) -> Any:
    """The same over more variables, which it leaves alone."""
    from scipy.optimize import LinearConstraint

    return LinearConstraint(np.pad(constraint.A, ((0, 0), (0, columns))), constraint.lb, constraint.ub)


def _groups(costs: CostModel, operators: list[str]) -> list[list[str]]:
    """Operators that read the same, two at least of them together."""
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
    """The plan with the fewest bytes: from the best single format on, operators change one after the other."""
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
