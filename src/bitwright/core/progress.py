"""The type of all progress callbacks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import TypeAlias

__all__ = ["Progress", "phases"]

#: Called with the number of finished units, the total (None: unknown) and a description of the current unit.
#: Example: `lambda done, total, description: print(f"{done}/{total} {description}")`.
Progress: TypeAlias = Callable[[int, int | None, str], None]


def phases(progress: Progress | None) -> Callable[[str], None]:
    """Report phases whose number isn't known in advance, by their descriptions.

    >>> begin = phases(lambda done, total, description: print(done, total, description))
    >>> begin("exporting")
    0 None exporting
    >>> begin("timing")
    1 None timing
    """
    numbers = count()

    def begin(description: str) -> None:
        if progress is not None:
            progress(next(numbers), None, description)

    return begin
