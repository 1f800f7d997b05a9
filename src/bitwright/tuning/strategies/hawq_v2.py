"""hawq_v2: back to float by the curvature of the loss."""

from __future__ import annotations

from bitwright.tuning.search import Asking, Search
from bitwright.tuning.strategies.fallback import accumulate, one


def hawq_v2(search: Search) -> Asking:
    """Operators by trace(H)·‖ΔW‖², Hutchinson's estimate on the user's own loss; accumulated from the highest."""
    search.need_loss("hawq_v2")
    start = yield from one([search.space.start()])
    if not start.passed:
        yield from accumulate(search, search.by_hessian())
