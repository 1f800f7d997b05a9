"""Handle interruptions: a signal stops the work immediately or at the next safe point.

Only the command line installs signal handlers (`bitwright.cli.signals`). Library users get Python's KeyboardInterrupt.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Interrupted(KeyboardInterrupt):
    """A signal stopped the work. `kept` states what was saved and how to resume, if known."""

    def __init__(self, cause: str = "interrupted", kept: str | None = None) -> None:
        super().__init__(cause if kept is None else f"{cause}: {kept}")
        self.cause, self.kept = cause, kept


class Stop:
    """The state of a stop request. The first signal raises `Interrupted` unless the work defers it."""

    def __init__(self) -> None:
        self.asked: str | None = None
        self.number: int | None = None
        self.raised = False
        self._deferred = 0
        self._pid = os.getpid()

    @property
    def received(self) -> bool:
        """Whether this process received a signal. A forked child starts without one."""
        return self.asked is not None and self._pid == os.getpid()

    def ask(self, number: int) -> None:
        """Record a signal and raise unless deferred. Raises only once, so that clean-up is not interrupted."""
        if self.asked is None:
            self.asked, self.number = signal.Signals(number).name, number
        if not self._deferred and not self.raised:
            self.check()

    def check(self) -> None:
        """Raise if a signal was received and the work is still running: other code may have caught the exception."""
        if self.received:
            self.raised = True
            raise Interrupted(f"interrupted by {self.asked}")

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Defer signals until the block ends. They are dropped if it ends with an error."""
        self._deferred += 1
        try:
            yield
        finally:
            self._deferred -= 1
        if not self._deferred and not self.raised:
            self.check()


_stops: list[Stop] = []


def current_stop() -> Stop:
    """The stop request of the command line; for library use, one that is never set."""
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
    """Stop between two units of work if a signal was received."""
    current_stop().check()


@contextmanager
def resumable(kept: str | Callable[[], str | None]) -> Iterator[None]:
    """Add what was saved and how to resume to an interruption. Errors caused by a signal count as interruptions."""
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
    """Finish this short block (such as saving a result) before a signal takes effect."""
    with current_stop().deferred():
        yield
