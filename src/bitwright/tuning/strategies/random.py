"""random: random candidates."""

from __future__ import annotations

from random import Random

from bitwright.tuning.candidate import Candidate
from bitwright.tuning.search import Asking, Search

_WAVE = 8  # candidates that may be evaluated in parallel
_MISSES = 1000  # consecutive repeats after which nearly all candidates have been seen


def random(search: Search) -> Asking:
    """Try each candidate at most once, starting with the default."""
    generator, seen = Random(search.seed), set[str]()
    wave: list[Candidate] = [search.space.start()]
    while wave:
        seen |= {candidate.key for candidate in wave}
        yield wave
        wave, misses = [], 0
        while len(wave) < _WAVE and misses < _MISSES:
            candidate = search.space.random(generator)
            if candidate.key in seen or any(candidate.key == other.key for other in wave):
                misses += 1
            else:
                wave.append(candidate)
