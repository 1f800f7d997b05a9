"""bisect (default): find the fewest sensitive operators that must stay in float, by bisection."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from bitwright.tuning.candidate import Base, TrialOutcome
from bitwright.tuning.search import CandidateBatch, CandidateGenerator, Search, evaluate_one


def bisect(search: Search) -> CandidateGenerator:
    """Keep the 1, 2, 4, … most sensitive operators in float until the goal is met, then bisect.

    Then quantize again every operator that doesn't need to be in float, most expensive first. The rest of the budget
    is spent on other settings of the whole model (formats, observers, PTQ steps), which may meet the goal with fewer
    operators in float.
    """
    space = search.space
    start = yield from evaluate_one([space.start()])
    if start.passed:
        yield from _faster(search)
        return
    order = search.by_output()
    kept = yield from _fewest(search, None, order)
    if kept is not None:
        kept = yield from _minimal(search, None, kept)
    yield from _recover(search, order if kept is None else kept)


def _fewest(
    search: Search, base: Base | None, order: Sequence[str]
) -> Generator[CandidateBatch, list[TrialOutcome], list[str] | None]:
    """The shortest prefix of `order` that must be float; an empty prefix is known to be insufficient."""
    low, high, count = 0, None, 1
    while high is None and low < len(order):
        count = min(count, len(order))
        outcome = yield from evaluate_one([search.space.floated(base, order[:count])])
        if outcome.passed:
            high = count
        else:
            low, count = count, 2 * count
    if high is None:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        outcome = yield from evaluate_one([search.space.floated(base, order[:middle])])
        low, high = (low, middle) if outcome.passed else (middle, high)
    return list(order[:high])


def _minimal(
    search: Search, base: Base | None, kept: list[str]
) -> Generator[CandidateBatch, list[TrialOutcome], list[str]]:
    """Quantize unnecessary float operators again: half of them at once, then quarters, … then single ones."""
    macs = {op.name: op.macs for op in search.space.operators}
    size = len(kept) // 2
    while size >= 1 and len(kept) > 1:
        costly = sorted(kept, key=lambda name: -macs[name])
        groups = [costly[i : i + size] for i in range(0, len(costly), size)]
        smaller = False
        for group in groups:
            rest = [name for name in kept if name not in group]
            outcome = yield from evaluate_one([search.space.floated(base, rest)])
            if outcome.passed:
                kept, smaller = rest, True
        if size > 1:
            size = min(size // 2, max(1, len(kept) // 2))
        elif not smaller:
            break
    return kept


def _faster(search: Search) -> CandidateGenerator:
    """Everything is quantized: other formats may be even faster."""
    start, formats = search.space.start(), ("weights", "activations")
    others = [base for base in search.space.bases() if base != start.base]
    quick = [b for b in others if all(getattr(b, n) == getattr(start.base, n) for n in vars(b) if n not in formats)]
    if quick:
        yield [search.space.start(base) for base in quick]


def _recover(search: Search, kept: Sequence[str]) -> CandidateGenerator:
    """Try other settings of the whole model, most similar first, and find how few of `kept` they need."""
    default, *others = search.space.bases()
    if not others:
        return
    others.sort(key=lambda base: (base.weights, base.activations) != (default.weights, default.activations))
    outcomes = yield [search.space.start(base) for base in others]
    short = [(base, outcome) for base, outcome in zip(others, outcomes, strict=True) if not outcome.passed]
    for base, _ in sorted(short, key=lambda pair: -pair[1].margin):
        if len(kept) > 1:
            found = yield from _fewest(search, base, kept[:-1])
            if found is not None:
                kept = found
