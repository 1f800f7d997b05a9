"""SIGINT, SIGTERM and SIGHUP on the command line: the first one ends the work cleanly, a second one at once."""

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
from bitwright.core.interrupts import Stop, listening

SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)  # Windows has no SIGHUP
_PATIENCE = 3.0  # seconds until a message says what is waited for
_STARTED: list[bool] = []
_WATCHERS: set[int] = set()  # write ends of the pipes that signals are told through


def exit_code(stop: Stop) -> int:
    """As shells report a process that the signal ended: 130 for Ctrl-C, 143 for SIGTERM."""
    return 128 + (stop.number or signal.SIGINT)


@contextmanager
def starting() -> Iterator[None]:
    """Until a verb listens by itself: imports take seconds, and there is nothing to clean up yet."""

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
    """All is written and said: the interpreter takes seconds to end, and must not seem to be killed meanwhile.

    Only signals that are ignored outlast the interpreter's own clean-up; handlers are taken away from it.
    """
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            with suppress(ValueError, OSError):
                signal.signal(number, signal.SIG_IGN)


@contextmanager
def signals(say: Callable[[str], None]) -> Iterator[Stop]:
    """Listen while a verb runs. A signal that was ignored from the start (nohup, a background job) stays ignored.

    Python runs its handlers only between two of its own instructions, which one long operation in C can delay. A
    thread therefore reads the signals as they arrive: it says what is waited for, and serves the second one.
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
    """If the process is still here after a while, say why."""
    time.sleep(_PATIENCE)
    if not pipe.closed:
        say("stopping after the current operation; a second Ctrl-C ends at once")


def end_now(number: int) -> None:
    """End without waiting for the main thread: remove temporary folders and end the children first."""
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
    """Processes that this one has started."""
    found: list[int] = []
    for task in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, task.read_text().split())
    return found


def _forget_in_child() -> None:
    """A forked child has signals of its own: they must not be read as its parent's."""
    if _WATCHERS:
        with suppress(ValueError):
            signal.set_wakeup_fd(-1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
