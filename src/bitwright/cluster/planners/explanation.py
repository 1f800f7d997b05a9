"""Explain why a plan doesn't fit a device: the largest parts of the memory, and a fix."""

from __future__ import annotations

from collections.abc import Mapping

from bitwright.cluster.cost_model import ACTIVATIONS, Assignment, CostModel
from bitwright.cluster.memory_limit import size
from bitwright.core.errors import Problem

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
