"""Error classes, and errors caused by the user's code.

Every error states what is wrong, where, the value, and how to fix it. `user_code` reports an exception from the user's
code as such, with its line and what was expected.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import reprlib
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

_MANY = 8  # more problems of one kind than this are printed as one line
_SHOWN = 3  # locations listed in such a line
UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, bidirectional overrides and surrogates."""
_LONGEST = 200  # characters of a value that are printed; a file may contain megabytes instead of a number


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong, as data, so that all problems can be reported together.

    >>> print(Problem(what="unknown site", where="sites", value="con1:weight", fix="did you mean 'conv1:weight'?"))
    sites: unknown site (got 'con1:weight')
        fix: did you mean 'conv1:weight'?
    """

    what: str
    where: str | None = None
    value: object = None
    fix: str | None = None
    code: str | None = None
    """A stable identifier such as `scale-underflow`, for programs and tests. The wording may change."""

    def __str__(self) -> str:
        what = shortened(self.what, 10 * _LONGEST)
        text = f"{shortened(self.where, 2 * _LONGEST)}: {what}" if self.where else what
        if self.value is not None:
            text += f" (got {shortened_repr(self.value)})"
        if self.fix:
            text += f"\n    fix: {self.fix}"
        return text


def problem_data(problem: Problem) -> dict[str, Any]:
    """All fields of a problem as plain data; a long value is shortened."""
    value = problem.value
    shown = None if value is None else shortened(value) if isinstance(value, str) else shortened_repr(value)
    return {**vars(problem), "value": shown}


class BitwrightError(Exception):
    """Base class of all errors that a user can fix. The command line prints them without a traceback.

    >>> import bitwright
    >>> try:
    ...     bitwright.load_workload("digit")
    ... except bitwright.BitwrightError as error:
    ...     print(error.codes, error.problems[0].fix)
    ['unknown-name'] did you mean 'digits'?
    """

    rank: int | None = None
    """The rank that caused the error, if other ranks are not affected. None: all ranks have the same error."""

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        value: object = None,
        fix: str | None = None,
        code: str | None = None,
    ) -> None:
        self.problems: list[Problem] = [Problem(what=what, where=where, value=value, fix=fix, code=code)]
        super().__init__(str(self.problems[0]))

    @property
    def codes(self) -> list[str]:
        """The codes of all problems, in order. A problem without a code is represented by the error's class name."""
        return [problem.code or type(self).__name__ for problem in self.problems]


class DiskError(BitwrightError):
    """The operating system failed to write a file."""


class FormatError(BitwrightError):
    """A number format that is invalid."""


class UnknownName(BitwrightError):
    """A name that is not registered."""


class DuplicateName(BitwrightError):
    """Two plugins register the same name."""


class WorkloadError(BitwrightError):
    """A workload that can't be loaded, or data that can't be used."""


class UserCodeError(WorkloadError):
    """A function of a workload raised an exception."""


class CaptureError(BitwrightError):
    """A model that can't be recorded."""


class CalibrationError(BitwrightError):
    """Calibration data that gives no valid range."""


class UncalibratedError(CalibrationError):
    """A quantizer was called before calibration."""


class RangeDiverged(CalibrationError):
    """The input of a quantizer became infinite or NaN during training."""


class BackendError(BitwrightError):
    """A backend table that is invalid."""


class ExportError(BitwrightError):
    """An artefact that would differ from the plan."""


class ArtefactError(BitwrightError):
    """An artefact that can't be read or run."""


class CheckpointError(BitwrightError):
    """A checkpoint that can't be read or belongs to another model."""


class PlanError(BitwrightError):
    """Several problems, reported together.

    >>> from bitwright import Plan
    >>> try:
    ...     Plan.from_yaml("{bitwright: 1, sites: {'a:weight': int88, 'b:weight': int8/row}}")
    ... except PlanError as error:
    ...     print([problem.where for problem in error.problems])
    ['a:weight', 'b:weight']
    """

    def __init__(self, problems: Sequence[Problem], *, title: str = "the plan has problems") -> None:
        self.problems = list(problems)
        self.title = title
        self.plan: Any = None
        """The valid part of a plan file with problems, to find further problems with the model."""
        lines = "\n".join(f"  - {words}" for words in _grouped(self.problems))
        Exception.__init__(self, f"{title} ({len(self.problems)}):\n{lines}")

    def __reduce__(self) -> tuple[Any, ...]:
        # By default, only the message of an exception is pickled. A worker's parent also needs the list of problems.
        return partial(type(self), title=self.title), (self.problems,)


def _grouped(problems: Sequence[Problem]) -> list[str]:
    """One text per problem. Many problems of the same kind share one line."""
    kinds: dict[str, list[Problem]] = {}
    for problem in problems:
        kinds.setdefault(problem.what, []).append(problem)
    lines: list[str] = []
    for same in kinds.values():
        if len(same) <= _MANY:
            lines += map(str, same)
            continue
        places = ", ".join(problem.where or "?" for problem in same[:_SHOWN])
        fixes = {problem.fix for problem in same}
        fix = same[0].fix if len(fixes) <= 2 else None  # different fixes are name suggestions for single locations
        lines.append(str(replace(same[0], where=f"{places} and {len(same) - _SHOWN} more", fix=fix)))
    return lines


class TrainError(PlanError):
    """A training run that can't start or continue."""

    def __init__(self, problems: Sequence[Problem], *, title: str = "the training has problems") -> None:
        super().__init__(problems, title=title)

    @classmethod
    def single(
        cls,
        what: str,
        *,
        where: str | None = None,
        value: object = None,
        fix: str | None = None,
        code: str | None = None,
    ) -> TrainError:
        """An error with a single problem, without a title."""
        problem = Problem(what=what, where=where, value=value, fix=fix, code=code)
        error = cls([problem])
        error.args = (str(problem),)
        return error


class TrainDiverged(TrainError):
    """The loss became infinite or NaN."""


def log_warnings(problems: Iterable[Problem]) -> None:
    """Log the warnings of a result. The command line prints log records as notes."""
    for problem in problems:
        logging.getLogger("bitwright").warning("%s", problem)


def visible_text(text: str) -> str:
    """Escape control characters such as terminal escape sequences. Names may come from untrusted files.

    >>> visible_text("a" + chr(27) + "[31m") == "a" + chr(92) + "x1b[31m"
    True
    """
    return UNSEEN.sub(lambda match: repr(match[0])[1:-1], text)


def shortened(text: str, most: int = _LONGEST) -> str:
    """The text, cut after `most` characters, with its full length."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"


def shortened_repr(value: object, most: int = _LONGEST) -> str:
    """`repr(value)`, cut if it is long. Large nested values are never formatted completely."""
    if isinstance(value, str):
        return shortened(repr(value), most) if len(value) <= most else f"{value[:most]!r}… ({len(value)} characters)"
    try:
        nested = isinstance(value, dict | list | tuple | set | frozenset)
        return shortened(_BRIEF.repr(value) if nested else repr(value), most)
    except ValueError:  # Python doesn't print integers of more than 4,300 digits
        return f"{type(value).__name__} with a very long number"


_BRIEF = reprlib.Repr()
_BRIEF.maxlevel, _BRIEF.maxstring, _BRIEF.maxother = 3, 60, 60


def nearest(name: str, known: Iterable[str], *, count: int = 3) -> list[str]:
    """The known names that are most similar to `name`, best first."""
    return difflib.get_close_matches(name, sorted(set(known)), n=count, cutoff=0.5)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint for a misspelled name: similar names, or some of all known names."""
    names = sorted(set(known))
    near = nearest(name, names)
    if near:
        return f"did you mean {', '.join(repr(n) for n in near)}?"
    shown = ", ".join(names[:12]) + (", …" if len(names) > 12 else "")
    return f"known: {shown}" if names else "nothing is registered for this kind"


# Code of packages and of the standard library; the user's code is the line that calls it. A virtual environment may use
# the packages of another one, so that their folder is not below its prefix.
_FOREIGN = tuple(
    {
        str(Path(__file__).parents[1]),
        *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
        sys.prefix,
    }
)
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


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


def _is_foreign(filename: str) -> bool:
    return filename.startswith((*_FOREIGN, "<")) or any(folder in filename for folder in _PACKAGES)


def line_of(error: BaseException) -> str:
    """The innermost line of the user's code in the traceback, as ", at file.py:12". "" if there is none."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_foreign(f.filename)]
    return f", at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


def defined_at(function: object) -> str:
    """Where the user defined a function, as ", at file.py:12". "" for functions of a package."""
    while isinstance(function, partial):
        function = function.func
    kind = vars(type(function))  # for a loss module or another callable object
    for place in (function, kind.get("forward"), kind.get("__call__")):
        code = getattr(place, "__code__", None)
        if code is not None and not _is_foreign(code.co_filename):
            return f", at {Path(code.co_filename).name}:{code.co_firstlineno}"
    return ""


def first_line(error: BaseException) -> str:
    """The first line of its message; torch's messages can have many lines."""
    return (str(error).strip().splitlines() or [""])[0]
