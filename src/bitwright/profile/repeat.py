"""Interleaved repetitions: everything once, then everything again, so that a slow minute is shared by all."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

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
    """The median of what each piece of work says of itself, in seconds; stops early after `most` seconds in all."""
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
    return {name: statistics.median(values) for name, values in taken.items()}
