"""Interruptions: a signal ends the work at once, or where the work says that it is safe.

Only the command line listens to signals (`bitwright.core.signals`); library calls see Python's own KeyboardInterrupt.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Interrupted(KeyboardInterrupt):
    """The work was stopped by a signal; `kept` says what remains and how to resume, where the work knows."""

    def __init__(self, cause: str = "interrupted", kept: str | None = None) -> None:
        super().__init__(cause if kept is None else f"{cause}: {kept}")
        self.cause, self.kept = cause, kept


class Stop:
    """Whether somebody asked to stop. The first signal raises `Interrupted`, unless the work has deferred it."""

    def __init__(self) -> None:
        self.asked: str | None = None
        self.number: int | None = None
        self.raised = False
        self._deferred = 0
        self._pid = os.getpid()

    @property
    def received(self) -> bool:
        """Whether a signal came to this process; a forked child starts without one."""
        return self.asked is not None and self._pid == os.getpid()

    def ask(self, number: int) -> None:
        """Take note of a signal; raise if nothing defers it. Only once: clean-up must not be interrupted in turn."""
        if self.asked is None:
            self.asked, self.number = signal.Signals(number).name, number
        if not self._deferred and not self.raised:
            self.check()

    def check(self) -> None:
        """Raise if a signal came that has not ended the work yet: code of others may have swallowed the exception."""
        if self.received:
            self.raised = True
            raise Interrupted(f"interrupted by {self.asked}")

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Within this block signals are only noted; at its end they count, unless it ended with an error."""
        self._deferred += 1
        try:
            yield
        finally:
            self._deferred -= 1
        if not self._deferred and not self.raised:
            self.check()


_stops: list[Stop] = []


def current_stop() -> Stop:
    """The one that the command line listens with; in library use, one that nobody ever asks."""
    return _stops[-1] if _stops else Stop()


@contextmanager
def listening(stop: Stop) -> Iterator[None]:
    """Make `stop` the current one."""
    _stops.append(stop)
    try:
        yield
    finally:
        _stops.remove(stop)


def safe_point() -> None:
    """Between two units of work: end here if a signal asked for it."""
    current_stop().check()


@contextmanager
def resumable(kept: str | Callable[[], str | None]) -> Iterator[None]:
    """Add to an interruption what is kept and how to resume; errors that follow from a signal are one, too."""
    try:
        yield
    except (KeyboardInterrupt, Exception) as error:
        stop = current_stop()
        if isinstance(error, Interrupted) and error.kept is not None:
            raise
        if not isinstance(error, KeyboardInterrupt) and not stop.received:
            raise
        cause = f"interrupted by {stop.asked}" if stop.received else str(error) or "interrupted"
        raise Interrupted(cause, kept if isinstance(kept, str) else kept()) from error


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Finish this short block before a signal counts: keeping a result, or giving work back."""
    with current_stop().deferred():
        yield
