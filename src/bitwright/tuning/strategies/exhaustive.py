"""exhaustive: all candidates, those with the fewest changes first."""

from __future__ import annotations

from itertools import islice

from bitwright.tuning.search import Asking, Search

_WAVE = 8  # candidates that may be evaluated in parallel


def exhaustive(search: Search) -> Asking:
    """Generate candidates until the budget ends."""
    everything = search.space.everything()
    while wave := list(islice(everything, _WAVE)):
        yield wave
