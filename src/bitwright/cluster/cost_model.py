"""The interface between planners and a cluster: penalties, seconds and bytes of a choice of precisions."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from bitwright.cluster.memory import MemoryLimit, size
from bitwright.core.arguments import strict
from bitwright.core.errors import Problem

FLOAT = "float"
ACTIVATIONS = "activations of "
"""Prefix of the names of memory parts that an operator saves for backward."""
Assignment = Mapping[str, str]
"""A format for each operator."""
Plans = Mapping[str, Assignment]
"""An assignment for each kind of device."""


class CostModel(Protocol):
    """The costs of training one model on one cluster."""

    @property
    def kinds(self) -> Mapping[str, int]:
        """The number of devices of each kind."""

    @property
    def operators(self) -> Sequence[str]:
        """The operators that can have several formats, in order."""

    def formats(self, kind: str, operator: str) -> Sequence[str]:
        """The formats in which this operator can run on such a device, including `float`."""

    def penalty(self, operator: str, format: str) -> float:
        """The sensitivity score of this operator in this format; 0 for float."""

    def step(self, plans: Plans, batches: Mapping[str, int]) -> float:
        """Seconds of one step of the whole cluster."""

    def work(self, kind: str, assignment: Assignment, batch: int) -> float:
        """Seconds that one such device computes in a step."""

    def memory(self, kind: str, assignment: Assignment, batch: int) -> int:
        """Bytes at the peak of a step."""

    def limit(self, kind: str) -> int | None:
        """Bytes that a plan may use on such a device: its memory minus the reserve."""

    def memory_limit(self, kind: str) -> MemoryLimit | None:
        """The limit with the device's memory and the reserve, for messages."""

    def parts(self, kind: str, assignment: Assignment, batch: int) -> Mapping[str, int]:
        """The memory by named parts, to explain why a model doesn't fit."""

    def reads(self, operator: str) -> Sequence[str]:
        """Earlier operators whose format may change the cost of this one, because of a cast between them."""

    def shares_input_with(self, operator: str) -> Sequence[str]:
        """Other operators that read one of its input tensors.

        Float operators share one saved copy of that tensor; each low-precision operator saves its own codes. So only
        the first float operator costs memory, and all of them may fit where one alone does not.
        """

    def cost_key(self, kind: str, operator: str) -> Hashable:
        """A key that is equal for operators with equal costs in every format and equal neighbours."""

    @property
    def batch(self) -> int:
        """Samples of each device's step, if they are equal."""

    @property
    def samples(self) -> int:
        """Samples of a step of all devices together."""


def total_penalty(costs: CostModel, plans: Plans, batches: Mapping[str, int]) -> float:
    """The penalty of all devices. A device's error is weighted by its share of the samples, squared."""
    samples = sum(costs.kinds[kind] * batches[kind] for kind in plans)
    return sum(
        costs.kinds[kind] * (batches[kind] / samples) ** 2 * sum(costs.penalty(op, f) for op, f in one.items())
        for kind, one in plans.items()
    )


@strict
@dataclass(frozen=True, kw_only=True)
class TableCost:
    """The cost of one operator in one format on one kind of device."""

    seconds: float
    bytes: int = 0


@strict
@dataclass(frozen=True, kw_only=True)
class TableCostModel:
    """A cost model from a table, in which operators don't affect each other: for tests and first estimates.

    `costs` are those of `batch` samples; they grow with the batch, `fixed` and `base` don't.
    """

    kinds: Mapping[str, int]
    operators: Sequence[str]
    costs: Mapping[str, Mapping[str, Mapping[str, TableCost]]]
    penalties: Mapping[str, Mapping[str, float]]
    batch: int = 1
    fixed: Mapping[str, float] = field(default_factory=dict)
    base: Mapping[str, int] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    reserve: float = 0.0
    """Share of the limits that plans leave free; 0 by default, because tables are exact."""

    @property
    def samples(self) -> int:
        """The same number on each device."""
        return sum(self.kinds.values()) * self.batch

    def formats(self, kind: str, operator: str) -> Sequence[str]:
        """The formats in the table."""
        return list(self.costs[kind][operator])

    def penalty(self, operator: str, format: str) -> float:

        return 0.0 if format == FLOAT else self.penalties[operator][format]

    def work(self, kind: str, assignment: Assignment, batch: int) -> float:
        """The sum."""
        share = batch / self.batch
        own = sum(self.costs[kind][op][format].seconds for op, format in assignment.items())
        return self.fixed.get(kind, 0.0) + share * own

    def step(self, plans: Plans, batches: Mapping[str, int]) -> float:
        """The time of the slowest device."""
        return max(self.work(kind, plan, batches[kind]) for kind, plan in plans.items())

    def memory(self, kind: str, assignment: Assignment, batch: int) -> int:
        """The sum."""
        share = batch / self.batch
        own = sum(self.costs[kind][op][format].bytes for op, format in assignment.items())
        return self.base.get(kind, 0) + int(share * own)

    def limit(self, kind: str) -> int | None:
        """The memory minus the reserve."""
        memory_limit = self.memory_limit(kind)
        return None if memory_limit is None else memory_limit.usable

    def memory_limit(self, kind: str) -> MemoryLimit | None:
        """The limit of the table."""
        return MemoryLimit(total=self.limits[kind], reserve=self.reserve) if kind in self.limits else None

    def parts(self, kind: str, assignment: Assignment, batch: int) -> Mapping[str, int]:
        """The bytes of each operator, and of the base."""
        own = {op: int(batch / self.batch * self.costs[kind][op][f].bytes) for op, f in assignment.items()}
        return {"the process itself": self.base.get(kind, 0), **own}

    def reads(self, operator: str) -> Sequence[str]:
        """The previous operator: a table has no graph."""
        index = list(self.operators).index(operator)
        return list(self.operators)[max(0, index - 1) : index]

    def shares_input_with(self, operator: str) -> Sequence[str]:
        """Empty, because operators in a table share no tensors."""
        return ()

    def cost_key(self, kind: str, operator: str) -> Hashable:
        """Its costs, because equal costs define equal operators in a table."""
        return tuple(self.costs[kind][operator].items())

    def with_limits(self, **limits: int) -> TableCostModel:
        """A copy with other memory limits."""
        return replace(self, limits=limits)


# -- plans that don't fit ----------------------------------------------------------------------------------------

_SHOWN = 4


def too_large(costs: CostModel, kind: str, plan: Assignment, batch: int, limit: int, *, split: bool = False) -> Problem:
    """Return the problem of a plan that needs too much memory. `split`: batches were already redistributed."""
    used = costs.memory(kind, plan, batch)
    parts = _together(costs.parts(kind, plan, batch))
    largest = sorted((name for name in parts if parts[name] > 0), key=lambda name: -parts[name])[:_SHOWN]
    words = ", ".join(f"{name} {size(parts[name])}" for name in largest)
    fitting = largest_batch(costs, kind, plan, batch)
    if fitting and (split or sum(costs.kinds.values()) == 1):
        fix = f"{fitting} of {batch} samples fit: --batch {fitting}"
    elif fitting:
        split_fix = "--planner recover+split moves the rest to other devices"
        fix = f"{fitting} of {batch} samples fit: {split_fix}; or --batch {fitting}"
    else:
        fix = "use more memory or a smaller model: not even one sample fits"
    memory_limit = costs.memory_limit(kind)
    described = str(memory_limit) if memory_limit is not None and memory_limit.usable == limit else size(limit)
    if memory_limit is not None and limit < used <= memory_limit.total:
        fix += "; it only fits if it uses the reserve, and may be killed; set `memory_reserve` in cluster.yaml"
    return Problem(
        what=f"needs {size(used)} on `{kind}`, limit {described}: largest contributors {words}",
        fix=fix,
        code="plan-exceeds-memory",
    )


def _together(parts: Mapping[str, int]) -> dict[str, int]:
    """Merge the activations of all operators into one part: a deep model has hundreds of small ones."""
    kept = {name: bytes for name, bytes in parts.items() if name.startswith(ACTIVATIONS) and bytes > 0}
    if len(kept) < 2:
        return dict(parts)
    most = max(kept, key=lambda name: kept[name])
    words = f"{ACTIVATIONS}{len(kept)} operators (most: {most.removeprefix(ACTIVATIONS)} {size(kept[most])})"
    return {**{name: bytes for name, bytes in parts.items() if name not in kept}, words: sum(kept.values())}


def largest_batch(costs: CostModel, kind: str, plan: Assignment, most: int) -> int:
    """Return the largest batch size up to `most` that fits; 0 if none does."""
    limit = costs.limit(kind)
    if limit is None or costs.memory(kind, plan, most) <= limit:
        return most
    fits, fails = 0, most
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if costs.memory(kind, plan, middle) <= limit:
            fits = middle
        else:
            fails = middle
    return fits
