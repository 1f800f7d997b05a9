"""Functions shared by strategies that move operators back to float."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from bitwright.tuning.candidate import Base, TrialOutcome
from bitwright.tuning.search import CandidateBatch, CandidateGenerator, Search


def evaluate_one(wave_of_one: CandidateBatch) -> Generator[CandidateBatch, list[TrialOutcome], TrialOutcome]:
    """Request a single candidate."""
    [outcome] = yield wave_of_one
    return outcome


def accumulate(
    search: Search, order: Sequence[str], base: Base | None = None
) -> Generator[CandidateBatch, list[TrialOutcome], bool]:
    """Move operators to float one by one, cumulatively, until the goal is met."""
    for count in range(1, len(order) + 1):
        outcome = yield from evaluate_one([search.space.floated(base, order[:count])])
        if outcome.passed:
            return True
    return False


def worst_first(search: Search, order: Sequence[str]) -> CandidateGenerator:
    """Quantize everything, then try single operators in float, worst first, then accumulate them.

    The accumulation starts with the operators that help most on their own.
    """
    start = yield from evaluate_one([search.space.start()])
    if start.passed:
        return
    singles = yield [search.space.floated(None, [name]) for name in order]
    if any(outcome.passed for outcome in singles):
        return
    gains = {name: outcome.margin for name, outcome in zip(order, singles, strict=True)}
    yield from accumulate(search, sorted(order, key=lambda name: -gains[name]))
