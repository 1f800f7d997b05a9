"""Handle interruptions: a signal stops the work immediately or at the next safe point.

Only the command line installs handlers for SIGINT, SIGTERM and SIGHUP. The first signal ends the work cleanly, and a
second one ends the process immediately. Library users get Python's KeyboardInterrupt.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from bitwright.core.files import remove_own_folders


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


SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)  # Windows has no SIGHUP
_PATIENCE = 3.0  # seconds until a message explains the delay
_STARTED: list[bool] = []
_WATCHERS: set[int] = set()  # write ends of the pipes that report signals


def exit_code(stop: Stop) -> int:
    """The exit code that shells report for a signal: 130 for Ctrl-C, 143 for SIGTERM."""
    return 128 + (stop.number or signal.SIGINT)


@contextmanager
def starting() -> Iterator[None]:
    """Handle signals until a verb does. Imports take seconds, and there is nothing to clean up yet."""

    def handle(number: int, frame: FrameType | None) -> None:
        if not _STARTED:
            os.write(2, f"error: interrupted by {signal.Signals(number).name}: nothing was written\n".encode())
        os._exit(128 + number)

    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                signal.signal(number, handle)
    try:
        yield
    finally:
        _ignore()


def _ignore() -> None:
    """Ignore signals while the interpreter exits, so that a finished run does not end with an error.

    Exiting takes seconds. The interpreter removes signal handlers meanwhile, but keeps ignored signals ignored.
    """
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            with suppress(ValueError, OSError):
                signal.signal(number, signal.SIG_IGN)


@contextmanager
def signals(say: Callable[[str], None]) -> Iterator[Stop]:
    """Handle signals while a verb runs. A signal that was ignored from the start (nohup) stays ignored.

    Python runs handlers between two of its instructions, so a long operation in C delays them. A thread reads the
    signals as they arrive. It explains the delay, and ends the process after a second signal.
    """
    stop = Stop()
    _STARTED.append(True)
    if threading.current_thread() is not threading.main_thread():
        with listening(stop):
            yield stop
        return
    owner = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() == owner:
            stop.ask(number)
        elif number != signal.SIGINT:  # a forked child: Ctrl-C reaches the whole group, and its parent ends it
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    before: dict[int, Any] = {number: signal.getsignal(number) for number in SIGNALS}
    before = {number: kind for number, kind in before.items() if kind not in (signal.SIG_IGN, None)}
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    watcher = threading.Thread(target=_watch, args=(reading, stop, say), daemon=True, name="bitwright-signals")
    watcher.start()
    _WATCHERS.add(writing)
    fd = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in before:
        signal.signal(number, handle)
    try:
        with listening(stop):
            yield stop
    finally:
        for number, kind in before.items():
            signal.signal(number, kind)
        signal.set_wakeup_fd(fd)
        _WATCHERS.discard(writing)
        os.close(writing)  # ends the thread
        watcher.join(1.0)


def _watch(reading: int, stop: Stop, say: Callable[[str], None]) -> None:
    seen: set[int] = set()
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        while data := pipe.read(1):
            number = data[0]
            if number not in SIGNALS:
                continue
            if number in seen:
                end_now(number)
            if not seen:
                threading.Thread(target=_explain, args=(stop, pipe, say), daemon=True).start()
            seen.add(number)


def _explain(stop: Stop, pipe: Any, say: Callable[[str], None]) -> None:
    """Explain why the process is still running after a while."""
    time.sleep(_PATIENCE)
    if not pipe.closed:
        say("stopping after the current operation; a second Ctrl-C ends at once")


def end_now(number: int) -> None:
    """Remove temporary folders, kill child processes, and exit without waiting for the main thread."""
    with suppress(Exception):
        remove_own_folders()
    with suppress(Exception):
        for child in _children():
            with suppress(OSError):
                os.kill(child, signal.SIGKILL)
    with suppress(Exception):
        sys.stderr.write("\nerror: interrupted twice: ended at once; rerun the command to resume\n")
        sys.stderr.flush()
    os._exit(128 + number)


def _children() -> list[int]:
    """The ids of child processes."""
    found: list[int] = []
    for task in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, task.read_text().split())
    return found


def _forget_in_child() -> None:
    """Stop a forked child from reporting its signals to its parent."""
    if _WATCHERS:
        with suppress(ValueError):
            signal.set_wakeup_fd(-1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
