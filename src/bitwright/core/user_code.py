"""Report exceptions from the user's code as such, with the line and what was expected."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from bitwright.core.errors import BitwrightError, UserCodeError

__all__ = ["defined_at", "first_line", "line_of", "user_code"]

# Code of packages and of the standard library; the user's code is the line that calls it.
_FOREIGN = tuple(
    {
        str(Path(__file__).parents[1]),
        *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
        sys.prefix,
    }
)


@contextmanager
def user_code(workload: str | None, what: str, *, expected: str, fix: str) -> Iterator[None]:
    """Convert exceptions in this block to errors about a part of the workload."""
    try:
        yield
    except BitwrightError:
        raise  # already has a clear message
    except Exception as error:
        raise UserCodeError(
            f"{what} raised {type(error).__name__}: {first_line(error)}{line_of(error)}; expected: {expected}",
            where=None if workload is None else f"workload {workload!r}",
            fix=fix,
            code="user-code-failed",
        ) from error


def line_of(error: BaseException) -> str:
    """The innermost line of the user's code in the traceback, as ", at file.py:12". "" if there is none."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((*_FOREIGN, "<"))]
    return f", at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


def defined_at(function: object) -> str:
    """Where the user defined a function, as ", at file.py:12". "" for functions of a package."""
    while isinstance(function, partial):
        function = function.func
    kind = vars(type(function))  # for a loss module or another callable object
    for place in (function, kind.get("forward"), kind.get("__call__")):
        code = getattr(place, "__code__", None)
        if code is not None and not code.co_filename.startswith((*_FOREIGN, "<")):
            return f", at {Path(code.co_filename).name}:{code.co_firstlineno}"
    return ""


def first_line(error: BaseException) -> str:
    """The first line of its message; torch's messages can have many lines."""
    return (str(error).strip().splitlines() or [""])[0]
