"""Silence loggers of third-party libraries."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet(*names: str, level: int = logging.ERROR) -> Iterator[None]:
    """Raise the level of these loggers, and of their descendants that set their own level, to `level`."""
    below = [name for name in logging.Logger.manager.loggerDict if name.startswith(tuple(f"{one}." for one in names))]
    loggers = [logging.getLogger(name) for name in names]
    loggers += [one for name in below if (one := logging.getLogger(name)).level]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(level)
    try:
        yield
    finally:
        for logger, old in zip(loggers, before, strict=True):
            logger.setLevel(old)
