"""The owner's code: what it raises is told as such, with its line and what was expected, not as an error of ours."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from bitwright.core.errors import BitwrightError, OwnersCodeError

__all__ = ["defined_at", "first_line", "line_of", "owners_code"]

# Code of packages and of the language is nobody's own: the line that called it is what can be mended.
_FOREIGN = tuple(
    {
        str(Path(__file__).parents[1]),
        *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
        sys.prefix,
    }
)


@contextmanager
def owners_code(workload: str | None, what: str, *, expected: str, fix: str) -> Iterator[None]:
    """While this lasts, what is raised is the fault of this part of a workload."""
    try:
        yield
    except BitwrightError:
        raise  # it says what is wrong already, and what to do
    except Exception as error:
        raise OwnersCodeError(
            f"{what} raised {type(error).__name__}: {first_line(error)}{line_of(error)}; expected: {expected}",
            where=None if workload is None else f"workload {workload!r}",
            fix=fix,
        ) from error


def line_of(error: BaseException) -> str:
    """The innermost line of the owner's files that led to an error, as ", at file.py:12"; "" if there is none."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((*_FOREIGN, "<"))]
    return f", at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


def defined_at(function: object) -> str:
    """Where the owner wrote a function, as ", at file.py:12"; "" for what comes from a package."""
    while isinstance(function, partial):
        function = function.func
    kind = vars(type(function))  # of a loss module, or of an object that is called
    for place in (function, kind.get("forward"), kind.get("__call__")):
        code = getattr(place, "__code__", None)
        if code is not None and not code.co_filename.startswith((*_FOREIGN, "<")):
            return f", at {Path(code.co_filename).name}:{code.co_firstlineno}"
    return ""


def first_line(error: BaseException) -> str:
    """Of its message: torch's go on for pages."""
    return (str(error).strip().splitlines() or [""])[0]
