"""Every error says what is wrong, where (the site), the value, and what to do next."""

from __future__ import annotations

import difflib
import logging
import re
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

_MANY = 8  # problems of a kind are one line if there are more
_SHOWN = 3  # of which so many are named
UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, those that turn the direction of a line, and halves of characters."""
_LONGEST = 200  # characters of a value; a file may hold megabytes where a number belongs


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong, as data, so that all of them can be listed at once."""

    what: str
    where: str | None = None
    value: object = None
    fix: str | None = None
    code: str | None = None
    """A stable identifier such as `scale-underflow`, for programs and tests; the wording may change."""

    def __str__(self) -> str:
        what = shortened(self.what, 10 * _LONGEST)
        text = f"{shortened(self.where, 2 * _LONGEST)}: {what}" if self.where else what
        if self.value is not None:
            text += f" (got {shortened_repr(self.value)})"
        if self.fix:
            text += f"\n    fix: {self.fix}"
        return text


class BitwrightError(Exception):
    """Base of all errors that a user can act upon; the command line prints it without a traceback."""

    rank: int | None = None
    """The process on whose data it came up, where others may be well; None: it is the same on all."""

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
        """The codes of all problems, in their order; a problem without one has the error's class instead."""
        return [problem.code or type(self).__name__ for problem in self.problems]


class DiskError(BitwrightError):
    """A disk or a file system refused to write."""


class FormatError(BitwrightError):
    """A number format that can't be read or can't exist."""


class UnknownName(BitwrightError):
    """A name that no plugin or built-in registered."""


class DuplicateName(BitwrightError):
    """Two plugins want the same name."""


class WorkloadError(BitwrightError):
    """A workload that can't be loaded or whose data can't be used."""


class UserCodeError(WorkloadError):
    """A workload's own function that raised while it was used."""


class CaptureError(BitwrightError):
    """A model that can't be recorded."""


class CalibrationError(BitwrightError):
    """Calibration data that gives no usable range."""


class UncalibratedError(CalibrationError):
    """A quantizer was asked to quantize before it had a range."""


class RangeDiverged(CalibrationError):
    """What reaches a quantizer in training isn't finite any more."""


class BackendError(BitwrightError):
    """A backend table that can't be read."""


class ExportError(BitwrightError):
    """The artefact would not be what the plan says."""


class ArtefactError(BitwrightError):
    """An artefact that can't be read or run."""


class CheckpointError(BitwrightError):
    """A checkpoint that can't be read, or is of another model."""


class PlanError(BitwrightError):
    """A plan with problems: all of them, not just the first."""

    def __init__(self, problems: Sequence[Problem], *, title: str = "the plan has problems") -> None:
        self.problems = list(problems)
        self.title = title
        lines = "\n".join(f"  - {words}" for words in _grouped(self.problems))
        Exception.__init__(self, f"{title} ({len(self.problems)}):\n{lines}")

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions are pickled by their text alone; a worker's list of problems must reach its parent.
        return partial(type(self), title=self.title), (self.problems,)


def _grouped(problems: Sequence[Problem]) -> list[str]:
    """Each in words; one line for many of a kind, which have one cause and one fix. `problems` has all of them."""
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
        fix = same[0].fix if len(fixes) <= 2 else None  # many are guesses at names, each for its own place
        lines.append(str(replace(same[0], where=f"{places} and {len(same) - _SHOWN} more", fix=fix)))
    return lines


class TrainError(PlanError):
    """A training run that can't start or go on."""

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
        """The error of one problem, without a list's words."""
        problem = Problem(what=what, where=where, value=value, fix=fix, code=code)
        error = cls([problem])
        error.args = (str(problem),)
        return error


class TrainDiverged(TrainError):
    """The loss isn't finite any more."""


def log_warnings(problems: Iterable[Problem]) -> None:
    """Log the warnings of a result; the command line shows log lines as notes."""
    for problem in problems:
        logging.getLogger("bitwright").warning("%s", problem)


def visible_text(text: str) -> str:
    """A text without what a terminal would obey, such as escape sequences: names may come from anybody's file.

    >>> visible_text("a" + chr(27) + "[31m") == "a" + chr(92) + "x1b[31m"
    True
    """
    return UNSEEN.sub(lambda match: repr(match[0])[1:-1], text)


def shortened(text: str, most: int = _LONGEST) -> str:
    """The beginning of a long text, and how much was left out."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"


def shortened_repr(value: object, most: int = _LONGEST) -> str:
    """`repr(value)`, cut where it is long; large nested values are never written out in full."""
    if isinstance(value, str):
        return shortened(repr(value), most) if len(value) <= most else f"{value[:most]!r}… ({len(value)} characters)"
    try:
        nested = isinstance(value, dict | list | tuple | set | frozenset)
        return shortened(_BRIEF.repr(value) if nested else repr(value), most)
    except ValueError:  # Python refuses to print integers of more than 4,300 digits
        return f"{type(value).__name__} with a very long number"


_BRIEF = reprlib.Repr()
_BRIEF.maxlevel, _BRIEF.maxstring, _BRIEF.maxother = 3, 60, 60


def nearest(name: str, known: Iterable[str], *, count: int = 3) -> list[str]:
    """The known names that look most like `name`, best first."""
    return difflib.get_close_matches(name, sorted(set(known)), n=count, cutoff=0.5)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint for a misspelt name: the nearest ones, or a part of all when nothing is near."""
    names = sorted(set(known))
    near = nearest(name, names)
    if near:
        return f"did you mean {', '.join(repr(n) for n in near)}?"
    shown = ", ".join(names[:12]) + (", …" if len(names) > 12 else "")
    return f"known: {shown}" if names else "nothing is registered under this kind"
