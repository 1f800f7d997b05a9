"""A search as a part of a report."""

from __future__ import annotations

from bitwright.report import Trial, Tuning
from bitwright.tuning.goal import Goal
from bitwright.tuning.result import Tuned
from bitwright.tuning.search import TrialRecord


def recorded(tuned: Tuned, metric: str) -> Tuning:
    """The course of a search: its goal, its trials, and the one that was chosen."""
    floats = {} if tuned.baseline is None else {k: v for k, v in tuned.baseline.metrics.items() if k != "n"}
    front = {asked.number for asked in tuned.pareto}
    speaks = metric in tuned.goal.metrics(metric) and metric in floats
    return Tuning(
        metric=metric,
        lower_is_better=not tuned.goal.higher_is_better(metric),
        strategy=tuned.strategy,
        goal=_goal(tuned.goal, metric),
        limit=tuned.goal.required(metric, floats[metric]) if speaks else None,
        met_goal=tuned.met_goal,
        stopped_because=tuned.stopped_because,
        float_metrics=floats,
        float_size=next((a.outcome.float_size for a in tuned.history if a.outcome.float_size is not None), None),
        full_evaluations=tuned.full_evaluations,
        notes=tuple(tuned.notes),
        trials=tuple(_trial(asked, tuned, asked.number in front) for asked in tuned.history),
    )


def _trial(asked: TrialRecord, tuned: Tuned, pareto: bool) -> Trial:
    outcome = asked.outcome
    return Trial(
        number=asked.number + 1,
        candidate=str(asked.candidate),
        passed=outcome.passed,
        metrics={name: value for name, value in outcome.metrics.items() if name != "n"},
        stopped=outcome.stopped,
        failed=outcome.failed,
        latency_ratio=outcome.latency_ratio,
        size=outcome.size,
        pareto=pareto,
        best=asked.candidate == tuned.candidate,
        seconds=outcome.seconds,
    )


def _goal(goal: Goal, metric: str) -> str:
    """What must hold, in words."""
    words = [f"{name}: at most {goal.drop_of(name)} lost" for name in goal.metrics(metric)]
    if goal.latency_ms is not None:
        words.append(f"latency at most {goal.latency_ms:g} ms")
    if goal.latency_ratio is not None:
        words.append(f"latency at most {goal.latency_ratio:g} of float's")
    if goal.size is not None:
        words.append(f"at most {goal.size:,} bytes")
    if goal.memory is not None:
        words.append(f"at most {goal.memory:,} bytes of memory")
    return ", ".join(words)
