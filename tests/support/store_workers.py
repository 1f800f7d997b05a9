"""What other processes do in tests of the store."""

from __future__ import annotations

import signal
from pathlib import Path

from bitwright.tuning import Candidate, TrialOutcome
from bitwright.tuning.search import Study, open_study

IDENTITY = {"model": "abc", "goal": {"drop": 0.01}}


def candidate(number: int) -> Candidate:
    return Candidate(float=frozenset({f"op{number}"}))


def outcome(value: float) -> TrialOutcome:
    return TrialOutcome(passed=True, accurate=True, margin=value, objective=value)


def opened(path: Path) -> Study:
    return open_study(path / "study.db", "study", IDENTITY, resume=True)


def claim_and_wait(path: Path, ready: object) -> None:
    assert opened(path).claim(candidate(0)) is not None
    ready.set()  # type: ignore[attr-defined]
    signal.pause()


def race(path: Path, begin: object, results: object) -> None:
    study = opened(path)
    begin.wait()  # type: ignore[attr-defined]
    for number in range(12):
        claim = study.claim(candidate(number))
        if claim is not None:
            study.finish(claim, outcome(number))
            results.put(number)  # type: ignore[attr-defined]
