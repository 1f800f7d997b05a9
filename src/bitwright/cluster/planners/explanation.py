"""Why a model doesn't fit a device: what needs the memory, and what would help."""

from __future__ import annotations

from collections.abc import Mapping

from bitwright.cluster.cost_model import ACTIVATIONS, Assignment, Machine
from bitwright.cluster.memory_limit import size
from bitwright.core.errors import Problem

_SHOWN = 4


def too_large(machine: Machine, kind: str, plan: Assignment, batch: int, limit: int, *, split: bool = False) -> Problem:
    """The problem of a device with a plan that is too large; `split`: also with batches that others take a part of."""
    used = machine.memory(kind, plan, batch)
    parts = _together(machine.parts(kind, plan, batch))
    largest = sorted((name for name in parts if parts[name] > 0), key=lambda name: -parts[name])[:_SHOWN]
    words = ", ".join(f"{name} {size(parts[name])}" for name in largest)
    fitting = largest_batch(machine, kind, plan, batch)
    if fitting and (split or sum(machine.kinds.values()) == 1):
        fix = f"{fitting} of {batch} samples fit: --batch {fitting}"
    elif fitting:
        fix = f"{fitting} of {batch} samples fit: --planner recover+split gives others the rest; or --batch {fitting}"
    else:
        fix = "more memory, or a smaller model: not even one sample fits"
    room = machine.room(kind)
    told = str(room) if room is not None and room.usable == limit else size(limit)
    if room is not None and limit < used <= room.total:
        fix += "; it fits only into the reserve, where it may be killed: `memory_reserve` in cluster.yaml sets that"
    return Problem(
        what=f"needs {size(used)} on `{kind}`, limit {told}: largest contributors {words}",
        fix=fix,
    )


def _together(parts: Mapping[str, int]) -> dict[str, int]:
    """What operators keep for backward as one: a deep model has hundreds of them, each of which is small."""
    kept = {name: bytes for name, bytes in parts.items() if name.startswith(ACTIVATIONS) and bytes > 0}
    if len(kept) < 2:
        return dict(parts)
    most = max(kept, key=lambda name: kept[name])
    words = f"{ACTIVATIONS}{len(kept)} operators (most: {most.removeprefix(ACTIVATIONS)} {size(kept[most])})"
    return {**{name: bytes for name, bytes in parts.items() if name not in kept}, words: sum(kept.values())}


def largest_batch(machine: Machine, kind: str, plan: Assignment, most: int) -> int:
    """How many samples fit, up to so many: memory only grows with them. 0 if not even one does."""
    limit = machine.limit(kind)
    if limit is None or machine.memory(kind, plan, most) <= limit:
        return most
    fits, fails = 0, most
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if machine.memory(kind, plan, middle) <= limit:
            fits = middle
        else:
            fails = middle
    return fits
