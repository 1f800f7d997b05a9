"""auto: the default candidate, then the strategies conservative and basic."""

from __future__ import annotations

from bitwright.tuning.search import Asking, Search
from bitwright.tuning.strategies.basic import basic
from bitwright.tuning.strategies.conservative import conservative
from bitwright.tuning.strategies.fallback import one


def auto(search: Search) -> Asking:
    """Try cheap candidates first."""
    outcome = yield from one([search.space.start()])
    if outcome.passed:
        return
    yield from conservative(search)
    yield from basic(search)
