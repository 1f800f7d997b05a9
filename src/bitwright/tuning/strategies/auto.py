"""auto: the default, then conservative, then basic."""

from __future__ import annotations

from bitwright.tuning.search import Asking, Search
from bitwright.tuning.strategies.basic import basic
from bitwright.tuning.strategies.conservative import conservative
from bitwright.tuning.strategies.fallback import one


def auto(search: Search) -> Asking:
    """What is cheap to try comes first."""
    outcome = yield from one([search.space.start()])
    if outcome.passed:
        return
    yield from conservative(search)
    yield from basic(search)
