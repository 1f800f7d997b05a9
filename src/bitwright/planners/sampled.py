"""What formats cost on one kind of device, sampled: each operator alone, and each pair that a cast may join."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from itertools import product

from bitwright.planners.machine import FLOAT, Machine

MARGIN = 0.005
"""Gain that lowering all operators must have at least, each its part of it: less is within what profiles are wrong."""
_NOTHING = 1e-7  # of the device's work: differences below it are rounding

Pair = tuple[str, str]


@dataclass(frozen=True)
class Sampled:
    """Seconds of a step as a sum: all in float, what each operator adds, what each pair adds to that."""

    base: float
    single: Mapping[Pair, float]
    """Of (operator, format)."""
    pairs: Mapping[Pair, Mapping[Pair, float]]
    """Of (operator, a later one), for formats of both; pairs that don't depend on each other are left out."""

    def seconds(self, plan: Mapping[str, str]) -> float:
        """The sum for one plan: exact where no three operators depend on each other."""
        alone = sum(self.single[item] for item in plan.items())
        joined = sum(own.get((plan[a], plan[b]), 0.0) for (a, b), own in self.pairs.items())
        return self.base + alone + joined


def sample(machine: Machine, kind: str, batch: int) -> Sampled:
    """Ask for differences from float; of operators and pairs that are alike, once."""
    order = list(machine.operators)
    place = {operator: index for index, operator in enumerate(order)}
    alike = [machine.likeness(kind, operator) for operator in order]
    floats = dict.fromkeys(order, FLOAT)
    base = machine.work(kind, floats, batch)
    known: dict[Hashable, float] = {}

    def added(changed: Mapping[str, str]) -> float:
        first, last = (pick(place[operator] for operator in changed) for pick in (min, max))
        formats = tuple((place[operator] - first, format) for operator, format in changed.items())
        around = alike[max(0, first - 1) : last + 2]  # whoever is before or follows may need a cast
        key = (tuple(around), first == 0, last + 1 == len(order), formats)
        if key not in known:
            known[key] = machine.work(kind, {**floats, **changed}, batch) - base
        return known[key]

    single = {
        (operator, format): 0.0 if format == FLOAT else added({operator: format})
        for operator in order
        for format in machine.formats(kind, operator)
    }
    pairs: dict[Pair, dict[Pair, float]] = {}
    for operator in order:
        for before in machine.reads(operator):
            options = product(machine.formats(kind, before), machine.formats(kind, operator))
            own = {
                (f, g): added({before: f, operator: g}) - single[before, f] - single[operator, g]
                for f, g in options
                if FLOAT not in (f, g)
            }
            own = {formats: seconds for formats, seconds in own.items() if abs(seconds) > _NOTHING * base}
            if own:
                pairs[before, operator] = own
    return Sampled(base, single, pairs)


def price_of(machine: Machine, sampled: Sampled) -> float:
    """Seconds that an operator must gain before it is lowered: float stays where a kernel isn't really faster."""
    return MARGIN * sampled.base / max(1, len(machine.operators))
