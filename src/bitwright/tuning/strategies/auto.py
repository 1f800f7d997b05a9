"""auto: the default candidate, then the strategies conservative and basic."""

from __future__ import annotations

from bitwright.tuning.search import CandidateGenerator, Search, evaluate_one
from bitwright.tuning.strategies.basic import basic
from bitwright.tuning.strategies.conservative import conservative


def auto(search: Search) -> CandidateGenerator:
    """Try cheap candidates first."""
    outcome = yield from evaluate_one([search.space.start()])
    if outcome.passed:
        return
    yield from conservative(search)
    yield from basic(search)
