"""What strategies that send operators back to float share."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from bitwright.tuning.candidate import Base, Outcome
from bitwright.tuning.search import Asking, Search, Wave


def one(wave_of_one: Wave) -> Generator[Wave, list[Outcome], Outcome]:
    """Ask for one candidate."""
    [outcome] = yield wave_of_one
    return outcome


def accumulate(search: Search, order: Sequence[str], base: Base | None = None) -> Generator[Wave, list[Outcome], bool]:
    """Send operators to float one after the other, all staying there, until the goal holds."""
    for count in range(1, len(order) + 1):
        outcome = yield from one([search.space.floated(base, order[:count])])
        if outcome.passed:
            return True
    return False


def worst_first(search: Search, order: Sequence[str]) -> Asking:
    """Everything quantized; each operator alone in float, the worst first; then more and more of them.

    What helps most alone is first in the accumulation.
    """
    start = yield from one([search.space.start()])
    if start.passed:
        return
    singles = yield [search.space.floated(None, [name]) for name in order]
    if any(outcome.passed for outcome in singles):
        return
    gains = {name: outcome.margin for name, outcome in zip(order, singles, strict=True)}
    yield from accumulate(search, sorted(order, key=lambda name: -gains[name]))
