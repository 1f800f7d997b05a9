"""Interleaved repetitions: everything once, then everything again, so that a slow minute is shared by all."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

Name = TypeVar("Name")


@contextmanager
def undisturbed() -> Iterator[None]:
    """No garbage collection meanwhile: it would be counted as the work of whoever is running."""
    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def interleaved(
    work: Mapping[Name, Callable[[], float]], *, rounds: int, warm: int = 2, most: float = 20.0
) -> dict[Name, float]:
    """What each piece of work typically says of itself, in seconds; stops early after `most` seconds in all."""
    taken: dict[Name, list[float]] = {name: [] for name in work}
    with undisturbed():
        spent = 0.0
        for number in range(rounds + warm):
            for name, run in work.items():
                seconds = run()
                spent += seconds
                if number >= warm or rounds == 0:
                    taken[name].append(seconds)
            if spent > most and number >= warm + 2:
                break
    return {name: typical(values) for name, values in taken.items()}


def middle_half(values: Iterable[Name], key: Callable[[Name], Any] | None = None) -> list[Name]:
    """Without the lowest and the highest quarter.

    >>> middle_half([9, 1, 2, 4, 3, 100, 5, 6])
    [3, 4, 5, 6]
    """
    ordered = sorted(values, key=key)  # type: ignore[type-var, arg-type]
    cut = len(ordered) // 4
    return ordered[cut : len(ordered) - cut]


def typical(values: Iterable[float]) -> float:
    """The mean of the middle half: strangers don't count, and a machine that stands still every other time does."""
    return statistics.fmean(middle_half(values))
