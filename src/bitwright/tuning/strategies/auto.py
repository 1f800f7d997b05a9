"""auto: the default candidate, then the strategies conservative and basic."""

from __future__ import annotations

from bitwright.tuning.search import CandidateGenerator, Search, accumulate, evaluate_one

_ORDER = ("conv", "matmul", "linear")


def conservative(search: Search) -> CandidateGenerator:
    """Quantize convolutions, matrix products, linear operators and the rest; keep each kind that meets the goal."""
    free = search.space.free
    kinds = sorted({op.kind for op in free}, key=lambda kind: (_place(kind), kind))
    quantized: set[str] = set()
    for kind in kinds:
        floats = [op.name for op in free if op.kind not in (*quantized, kind)]
        outcome = yield from evaluate_one([search.space.floated(None, floats)])
        if outcome.passed:
            quantized.add(kind)


def _place(kind: str) -> int:
    return next((place for place, start in enumerate(_ORDER) if kind.startswith(start)), len(_ORDER))


def basic(search: Search) -> CandidateGenerator:
    """Start with the settings closest to the default, then move operators to float, from the last to the first.

    Then combine the operators that helped, most helpful first: only those that improve the result and, if that isn't
    enough, all of them.
    """
    space = search.space
    bases = list(space.bases())
    outcomes = yield [space.start(base) for base in bases]
    if any(outcome.passed for outcome in outcomes):
        return
    best, base = max(zip(outcomes, bases, strict=True), key=lambda pair: pair[0].margin)
    names = [op.name for op in reversed(space.free)]
    singles = yield [space.floated(base, [name]) for name in names]
    if any(outcome.passed for outcome in singles):
        return
    order = sorted(zip(names, singles, strict=True), key=lambda pair: -pair[1].margin)
    kept: list[str] = []
    margin = best.margin
    for name, _ in order:
        outcome = yield from evaluate_one([space.floated(base, [*kept, name])])
        if outcome.passed:
            return
        if outcome.margin > margin:
            kept.append(name)
            margin = outcome.margin
    yield from accumulate(search, [name for name, _ in order], base)


def auto(search: Search) -> CandidateGenerator:
    """Try cheap candidates first."""
    outcome = yield from evaluate_one([search.space.start()])
    if outcome.passed:
        return
    yield from conservative(search)
    yield from basic(search)
