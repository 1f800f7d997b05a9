"""The study of a search: candidates and their outcomes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from bitwright.study import Study as AnyStudy
from bitwright.study import open_study as open_any
from bitwright.tuning.candidate import Candidate
from bitwright.tuning.outcome import Outcome, failure

Study: TypeAlias = AnyStudy[Candidate, Outcome]


def open_study(store: str | Path | None, name: str, identity: Mapping[str, Any], *, resume: bool) -> Study:
    """Begin a search's study, or go on with one; one that differs in model, data, goal or space is refused.

    `store` is a file, a URL (postgresql://…), or None for one that ends with this process.
    """
    return open_any(store, name, identity, resume=resume, kind=Outcome, gave_up=failure)
