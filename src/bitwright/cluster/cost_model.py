"""What a planner of precisions asks about a cluster: penalties, seconds, bytes; not where they come from."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from bitwright.cluster.memory_limit import MemoryLimit
from bitwright.core.arguments import strict

FLOAT = "float"
ACTIVATIONS = "activations of "
"""How parts of memory begin that an operator, named behind it, keeps for its backward."""
Assignment = Mapping[str, str]
"""A format for each operator."""
Plans = Mapping[str, Assignment]
"""An assignment for each kind of device."""


class Machine(Protocol):
    """A model on a cluster."""

    @property
    def kinds(self) -> Mapping[str, int]:
        """How many devices there are of each kind."""

    @property
    def operators(self) -> Sequence[str]:
        """The operators that can have several formats, in order."""

    def formats(self, kind: str, operator: str) -> Sequence[str]:
        """What this operator can run in on such a device; `float` is among them."""

    def penalty(self, operator: str, format: str) -> float:
        """What the training suffers; 0 for float."""

    def step(self, plans: Plans, batches: Mapping[str, int]) -> float:
        """Seconds of one step of the whole cluster."""

    def work(self, kind: str, assignment: Assignment, batch: int) -> float:
        """Seconds that one such device computes in a step."""

    def memory(self, kind: str, assignment: Assignment, batch: int) -> int:
        """Bytes at the peak of a step."""

    def limit(self, kind: str) -> int | None:
        """Bytes that a plan may need on such a device: what it has, less the reserve."""

    def room(self, kind: str) -> MemoryLimit | None:
        """The same with what the device has, and the reserve: to explain what doesn't fit."""

    def parts(self, kind: str, assignment: Assignment, batch: int) -> Mapping[str, int]:
        """What those bytes are made of, in words: for a user whose model doesn't fit."""

    def reads(self, operator: str) -> Sequence[str]:
        """Operators before it whose format may change what this one costs: there may be a cast between them."""

    def beside(self, operator: str) -> Sequence[str]:
        """Others that read a tensor that it reads: in float it is kept for all of them once, of codes each has its own.

        So float may cost memory only for the first of them, and one alone may not fit where all do.
        """

    def likeness(self, kind: str, operator: str) -> Hashable:
        """Equal for operators that cost the same in every format, next to equal ones: one is asked for all."""

    @property
    def batch(self) -> int:
        """Samples of each device's step, if they are equal."""


def total_penalty(machine: Machine, plans: Plans, batches: Mapping[str, int]) -> float:
    """Of all devices: the gradient is a mean over samples, so a device's error counts with its share, squared."""
    samples = sum(machine.kinds[kind] * batches[kind] for kind in plans)
    return sum(
        machine.kinds[kind] * (batches[kind] / samples) ** 2 * sum(machine.penalty(op, f) for op, f in one.items())
        for kind, one in plans.items()
    )


@strict
@dataclass(frozen=True, kw_only=True)
class OperatorCost:
    """What one operator takes in one format on one kind of device."""

    seconds: float
    bytes: int = 0


@strict
@dataclass(frozen=True, kw_only=True)
class Additive:
    """A machine whose operators cost what a table says, independent of each other: for tables, tests and first guesses.

    `costs` are those of `batch` samples; they grow with the batch, `fixed` and `base` don't.
    """

    kinds: Mapping[str, int]
    operators: Sequence[str]
    costs: Mapping[str, Mapping[str, Mapping[str, OperatorCost]]]
    penalties: Mapping[str, Mapping[str, float]]
    batch: int = 1
    fixed: Mapping[str, float] = field(default_factory=dict)
    base: Mapping[str, int] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    reserve: float = 0.0
    """Share of the limits that plans leave free: a table is exact, as long as nobody says otherwise."""

    def formats(self, kind: str, operator: str) -> Sequence[str]:
        """What the table has."""
        return list(self.costs[kind][operator])

    def penalty(self, operator: str, format: str) -> float:
        """Float is free."""
        return 0.0 if format == FLOAT else self.penalties[operator][format]

    def work(self, kind: str, assignment: Assignment, batch: int) -> float:
        """The sum."""
        share = batch / self.batch
        own = sum(self.costs[kind][op][format].seconds for op, format in assignment.items())
        return self.fixed.get(kind, 0.0) + share * own

    def step(self, plans: Plans, batches: Mapping[str, int]) -> float:
        """Everybody waits for the slowest."""
        return max(self.work(kind, plan, batches[kind]) for kind, plan in plans.items())

    def memory(self, kind: str, assignment: Assignment, batch: int) -> int:
        """The sum."""
        share = batch / self.batch
        own = sum(self.costs[kind][op][format].bytes for op, format in assignment.items())
        return self.base.get(kind, 0) + int(share * own)

    def limit(self, kind: str) -> int | None:
        """What is left beside the reserve."""
        room = self.room(kind)
        return None if room is None else room.usable

    def room(self, kind: str) -> MemoryLimit | None:
        """What was said."""
        return MemoryLimit(total=self.limits[kind], reserve=self.reserve) if kind in self.limits else None

    def parts(self, kind: str, assignment: Assignment, batch: int) -> Mapping[str, int]:
        """Each operator, and what is there without any."""
        own = {op: int(batch / self.batch * self.costs[kind][op][f].bytes) for op, f in assignment.items()}
        return {"the process itself": self.base.get(kind, 0), **own}

    def reads(self, operator: str) -> Sequence[str]:
        """A table has no graph: each is taken to follow the one before it."""
        index = list(self.operators).index(operator)
        return list(self.operators)[max(0, index - 1) : index]

    def beside(self, operator: str) -> Sequence[str]:
        """In a table each keeps its own."""
        return ()

    def likeness(self, kind: str, operator: str) -> Hashable:
        """By its costs."""
        return tuple(self.costs[kind][operator].items())

    def with_limits(self, **limits: int) -> Additive:
        """The same with other memory."""
        return replace(self, limits=limits)
