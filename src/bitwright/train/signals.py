"""Ctrl-C and a polite kill end a run at the next step, with a checkpoint."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Stop:
    """Whether somebody asked to stop."""

    def __init__(self) -> None:
        self.asked: str | None = None


class Interrupted(KeyboardInterrupt):
    """The run was stopped, and can go on."""


@contextmanager
def stoppable() -> Iterator[Stop]:
    """Note SIGINT and SIGTERM instead of dying; the second one is served at once."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def note(number: int, frame: FrameType | None) -> None:
        stop.asked = signal.Signals(number).name
        signal.signal(number, before[number])

    before: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, note)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
