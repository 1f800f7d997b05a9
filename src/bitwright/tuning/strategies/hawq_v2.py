"""hawq_v2: move operators to float by the curvature of the loss."""

from __future__ import annotations

from bitwright.tuning.search import CandidateGenerator, Search, accumulate, evaluate_one


def hawq_v2(search: Search) -> CandidateGenerator:
    """Accumulate operators by trace(H)·‖ΔW‖², largest first, with Hutchinson's estimate on the user's loss."""
    search.need_loss("hawq_v2")
    start = yield from evaluate_one([search.space.start()])
    if not start.passed:
        yield from accumulate(search, search.by_hessian())
