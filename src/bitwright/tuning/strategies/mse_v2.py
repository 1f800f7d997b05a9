"""mse_v2: repeatedly move the most helpful operator to float, then quantize as many as possible again."""

from __future__ import annotations

from bitwright.tuning.search import CandidateGenerator, Search, evaluate_one


def mse_v2(search: Search) -> CandidateGenerator:
    """While the goal is missed, move the operator to float that improves the outputs most.

    Operators are ranked in every round. Once the goal is met, quantize the least helpful ones again until it is missed.
    """
    space, kept = search.space, list[str]()
    outcome = yield from evaluate_one([space.start()])
    names = [op.name for op in space.free]
    while not outcome.passed and len(kept) < len(names):
        kept.append(search.by_outputs_of({name: [*kept, name] for name in names if name not in kept})[0])
        outcome = yield from evaluate_one([space.floated(None, kept)])
    while outcome.passed and len(kept) > 1:
        least = search.by_outputs_of({name: [other for other in kept if other != name] for name in kept})[0]
        outcome = yield from evaluate_one([space.floated(None, [name for name in kept if name != least])])
        if outcome.passed:
            kept.remove(least)
