"""The result of `bitwright tune` in a record."""

from __future__ import annotations

from pydantic import Field

from bitwright.core.documents import ResultModel
from bitwright.tuning.goal import Goal
from bitwright.tuning.result import Tuned
from bitwright.tuning.search import TrialRecord


class TrialRow(ResultModel):
    """One candidate of a search."""

    number: int = Field(description="From 1.")
    candidate: str
    passed: bool
    metrics: dict[str, float] = Field(description="Estimates if `stopped`.")
    stopped: bool = Field(description="Evaluated on a part of the data only.")
    failed: str | None = Field(description="Why it could not be measured.")
    latency_ratio: float | None = Field(description="Relative to float in the same run.")
    size: int | None
    pareto: bool = Field(description="On the Pareto front of metric, latency and size.")
    best: bool
    seconds: float


class TuningRecord(ResultModel):
    """A search until the goal is met."""

    metric: str
    lower_is_better: bool = False
    strategy: str
    goal: str
    limit: float | None = Field(description="The worst value of the metric that meets the goal.")
    met_goal: bool | None
    stopped_because: str
    float_metrics: dict[str, float] = Field(description="Of the float model; empty: not measured.")
    float_size: int | None
    full_evaluations: int
    notes: tuple[str, ...]
    trials: tuple[TrialRow, ...]


def tuning_record(tuned: Tuned, metric: str) -> TuningRecord:
    """The goal, the trials and the chosen candidate of a search."""
    floats = {} if tuned.baseline is None else {k: v for k, v in tuned.baseline.metrics.items() if k != "n"}
    front = {asked.number for asked in tuned.pareto}
    speaks = metric in tuned.goal.metrics(metric) and metric in floats
    return TuningRecord(
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


def _trial(asked: TrialRecord, tuned: Tuned, pareto: bool) -> TrialRow:
    outcome = asked.outcome
    return TrialRow(
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
    """The conditions of a goal as text."""
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
