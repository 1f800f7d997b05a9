"""exhaustive: all candidates, those with the fewest changes first."""

from __future__ import annotations

from itertools import islice

from bitwright.tuning.search import Asking, Search

_WAVE = 8  # how many may be at work at the same time


def exhaustive(search: Search) -> Asking:
    """Never written down as a whole: the budget ends it."""
    everything = search.space.everything()
    while wave := list(islice(everything, _WAVE)):
        yield wave
