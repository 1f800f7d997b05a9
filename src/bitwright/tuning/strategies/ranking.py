"""Strategies that move operators to float in the order of a ranking: mse, mse_v2 and hawq_v2."""

from __future__ import annotations

from bitwright.tuning.search import CandidateGenerator, Search, accumulate, evaluate_one, worst_first


def mse(search: Search) -> CandidateGenerator:
    """Operators by the mean squared error between float and quantized activations, worst first."""
    yield from worst_first(search, search.by_mse())


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


def hawq_v2(search: Search) -> CandidateGenerator:
    """Accumulate operators by trace(H)·‖ΔW‖², largest first, with Hutchinson's estimate on the user's loss."""
    search.need_loss("hawq_v2")
    start = yield from evaluate_one([search.space.start()])
    if not start.passed:
        yield from accumulate(search, search.by_hessian())
