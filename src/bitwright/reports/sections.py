"""The parts of a record that one verb makes: `score`, `train`, `tune` and `predict`."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import BaseModel, Field

from bitwright.cluster import Prediction
from bitwright.cluster.measurement import StepComparison, TimePair
from bitwright.cluster.prediction import trace_events
from bitwright.core.arguments import strict
from bitwright.core.documents import read_json
from bitwright.core.schemas import ResultModel, validated
from bitwright.sensitivity import Scores, SiteScore, Suggestion
from bitwright.training.config import TrainConfig
from bitwright.tuning.goal import Goal
from bitwright.tuning.result import Tuned
from bitwright.tuning.search import TrialRecord


class SiteSensitivity(ResultModel):
    """Errors of the model when only this site is quantized."""

    site: str
    format: str
    sqnr_db: float | None = Field(description="SQNR of the values at the site. None: no error.")
    output_error: float
    cosine_distance: float
    loss_change: float | None = Field(description="None: the workload has no loss.")


class FloatTrialRow(ResultModel):
    """The metric with these operators in float."""

    operators: tuple[str, ...]
    metric: float


class SuggestionRow(ResultModel):
    """The effect of keeping the worst operators in float."""

    metric: str
    before: float
    trials: tuple[FloatTrialRow, ...]
    operators: tuple[str, ...] = Field(description="The suggestion; empty if float operators give no gain.")


class Sensitivity(ResultModel):
    """Sites, worst first."""

    samples: int
    sites: tuple[SiteSensitivity, ...]
    together: SiteSensitivity
    suggestion: SuggestionRow | None = None


@strict
def sensitivity(scores: Scores, suggestion: Suggestion | None = None, metric: str = "") -> Sensitivity:
    """Make the part of a record from scores."""
    return Sensitivity(
        samples=scores.samples,
        sites=tuple(_site_row(score) for score in scores.sites),
        together=_site_row(scores.together),
        suggestion=None
        if suggestion is None
        else SuggestionRow(
            metric=metric,
            before=suggestion.before,
            trials=tuple(FloatTrialRow(operators=tuple(t.operators), metric=t.metric) for t in suggestion.trials),
            operators=tuple(suggestion.operators),
        ),
    )


def _site_row(score: SiteScore) -> SiteSensitivity:
    return SiteSensitivity(
        site=score.site,
        format=score.format,
        sqnr_db=score.sqnr_db if score.sqnr_db is not None and isfinite(score.sqnr_db) else None,
        output_error=score.output_error,
        cosine_distance=score.cosine_distance,
        loss_change=score.loss_change,
    )


class RankTimesRow(ResultModel):
    """Step times in a few steps of an adaptive run."""

    step: int
    step_ms: float
    predicted_ms: float = Field(description="With the plan and the speeds that the run knew then.")
    own_ms: tuple[float, ...] = Field(description="What each rank computed; it waited for the rest of the step.")


class SwitchRow(ResultModel):
    """A switch to another plan."""

    step: int
    reason: str
    batches: tuple[int, ...] = Field(description="Samples of each rank.")
    low: tuple[int, ...] = Field(description="Operators in low precision on each rank.")
    stayed_ms: float | None = Field(description="Predicted step time without the switch. None: the ranks changed.")
    predicted_ms: float
    measured_ms: float | None = Field(description="Until the next switch. None: too few steps.")


class AdaptiveRecord(ResultModel):
    """The course of an adaptive run."""

    ranks: tuple[str, ...] = Field(description="The section of each rank in the plan.")
    idle: tuple[float, ...] = Field(description="Share of the time that each rank waited for others.")
    rows: tuple[RankTimesRow, ...]
    switches: tuple[SwitchRow, ...]


def adaptive_record(facts: dict[str, Any]) -> AdaptiveRecord:
    """The course of a run from the `adaptive` part of its `result.json`."""
    rows, switches = facts["rows"], facts["switches"]
    ranks = tuple(facts["sections"])
    last = [row for row in rows if len(row["own"]) == len(ranks)]  # other ranks may have begun the run
    whole = sum(row["seconds"] for row in last)
    ends = [*(switch["step"] for switch in switches[1:]), float("inf")]
    measured = [
        [row["seconds"] for row in rows if switch["step"] < row["step"] <= end]
        for switch, end in zip(switches, ends, strict=False)
    ]
    return AdaptiveRecord(
        ranks=ranks,
        idle=tuple(
            max(0.0, 1 - sum(row["own"][rank] for row in last) / whole) if whole else 0.0 for rank in range(len(ranks))
        ),
        rows=tuple(
            RankTimesRow(
                step=row["step"],
                step_ms=1e3 * row["seconds"],
                predicted_ms=1e3 * row["predicted"],
                own_ms=tuple(1e3 * seconds for seconds in row["own"]),
            )
            for row in rows
        ),
        switches=tuple(
            SwitchRow(
                step=switch["step"],
                reason=switch["reason"],
                batches=tuple(switch["batches"]),
                low=tuple(switch["low"]),
                stayed_ms=None if switch["predicted_before"] is None else 1e3 * switch["predicted_before"],
                predicted_ms=1e3 * switch["predicted"],
                measured_ms=1e3 * fmean(seconds) if seconds else None,
            )
            for switch, seconds in zip(switches, measured, strict=True)
        ),
    )


class TrainingRecord(ResultModel):
    """A training run."""

    metric: str
    precision: str
    metrics: tuple[dict[str, float], ...] = Field(description="The metrics after each epoch.")
    best_epoch: int | None = Field(description="From 1.")
    steps: int
    processes: int
    config_hash: str
    settings: dict[str, str] = Field(description="The settings that differ from the defaults.")
    init: str | None = Field(description="The initial weights.")
    notes: tuple[str, ...]
    adaptive: AdaptiveRecord | None = Field(default=None, description="None: the plan was fixed.")


class _BestEpoch(BaseModel):
    epoch: int = Field(ge=0)


class _TrainResultFile(BaseModel):
    """The fields of `result.json` that a report needs."""

    metric: str
    quantize: str | None
    compute: str | None
    metrics: tuple[dict[str, float], ...]
    best: _BestEpoch | None = None
    steps: int = Field(ge=0)
    processes: int = Field(ge=1)
    config_hash: str
    config: dict[str, Any]
    init: str | None
    notes: tuple[str, ...]
    adaptive: dict[str, Any] | None = None


def training_record(run: str | Path) -> TrainingRecord | None:
    """The training in a run's folder, from its `result.json`; None if there is no such file."""
    path = Path(run) / "result.json"
    if not path.is_file():
        return None
    fix = "train again, or remove the file to omit the training from the report"
    data = read_json(path, what="the training's result", fix=fix, finite=False)
    facts = validated(_TrainResultFile, data, title=f"{path} is not the result of a training", fix=fix)
    usual = TrainConfig().model_dump()
    return TrainingRecord(
        metric=facts.metric,
        precision=facts.quantize or facts.compute or "float",
        metrics=facts.metrics,
        best_epoch=None if facts.best is None else facts.best.epoch,
        steps=facts.steps,
        processes=facts.processes,
        config_hash=facts.config_hash,
        settings={key: str(value) for key, value in facts.config.items() if value != usual.get(key)},
        init=facts.init,
        notes=facts.notes,
        adaptive=None if facts.adaptive is None else adaptive_record(facts.adaptive),
    )


def weights_before(run: str | Path) -> Path | None:
    """The initial float weights of a run, if the file still exists."""
    path = Path(run) / "result.json"
    data = read_json(path, what="the training's result", finite=False) if path.is_file() else None
    init = data.get("init") if isinstance(data, dict) else None
    return Path(init) if isinstance(init, str) and "\0" not in init and Path(init).exists() else None


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
    pareto: bool = Field(description="Whether it is on the Pareto front of metric, latency and size.")
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
    float_metrics: dict[str, float] = Field(description="The metrics of the float model; empty: not measured.")
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
        goal=_goal_text(tuned.goal, metric),
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


def _goal_text(goal: Goal, metric: str) -> str:
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


_DEVICES = 16  # kinds of devices with a timeline; exact mode can have a thousand
_SPANS = 1200  # per device; a screen can't show more


class Span(ResultModel):
    """One operator or collective on the time axis of a device."""

    name: str
    kind: str = Field(description="forward, backward, tail, or collective.")
    start_ms: float
    end_ms: float


class ForecastDevice(ResultModel):
    """One kind of device, with the number of devices of this kind."""

    name: str
    count: int
    computing_ms: float
    busy: float = Field(description="Share of the step during which it computes.")
    communicating: float
    waiting: float
    phases_ms: dict[str, float] = Field(description="Predicted, in the order of a step.")
    memory_peak: int | None = Field(default=None, description="Bytes.")
    memory_cause: str | None = None
    memory_process: int | None = Field(default=None, description="Bytes of the whole process, which must fit.")
    memory_limit: int | None = Field(default=None, description="Bytes that the device has.")
    memory_reserve: float = Field(
        default=0.0,
        description="Share of the limit that stays free, because predictions have an error of some percent.",
    )
    stood_in: int = Field(default=0, description="Operators that were not measured in their format.")
    spans: tuple[Span, ...] = ()


class PredictedAndMeasured(ResultModel):
    """Predicted and measured time of a step, a phase or a kind of operators."""

    name: str
    predicted_ms: float
    measured_ms: float


class MeasuredSteps(ResultModel):
    """Measured steps of the first device."""

    steps: int
    step: PredictedAndMeasured
    phases: tuple[PredictedAndMeasured, ...]
    groups: tuple[PredictedAndMeasured, ...] = Field(description="Operators by kind, and casts.")
    drift: float | None = Field(
        description="Time of a fixed workload now, relative to its time when the device was profiled."
    )


class Forecast(ResultModel):
    """One plan on one device, or on a cluster."""

    name: str = Field(description="The predicted precision or plan; a later forecast of this name replaces it.")
    step_ms: float
    samples_per_second: float
    critical: tuple[str, ...]
    devices: tuple[ForecastDevice, ...]
    left_out: int = Field(default=0, description="Devices without a row, because there are too many.")
    measured: MeasuredSteps | None = None


def forecast(prediction: Prediction, name: str, comparison: StepComparison | None = None) -> Forecast:
    """Make the forecast of a prediction."""
    spans = _spans(prediction)
    return Forecast(
        name=name,
        step_ms=1e3 * prediction.seconds,
        samples_per_second=prediction.samples_per_second,
        critical=prediction.critical,
        left_out=max(0, len(prediction.devices) - _DEVICES),
        devices=tuple(
            ForecastDevice(
                name=device.name,
                count=device.count,
                computing_ms=1e3 * device.computing,
                busy=device.busy,
                communicating=device.communicating,
                waiting=device.waiting,
                phases_ms={phase: 1e3 * seconds for phase, seconds in device.phases.items()},
                memory_peak=None if device.memory is None else device.memory.peak,
                memory_cause=None if device.memory is None else device.memory.cause,
                memory_process=None if device.memory is None else device.memory.process,
                memory_limit=None if device.limit is None else device.limit.total,
                memory_reserve=0.0 if device.limit is None else device.limit.reserve,
                stood_in=device.stood_in,
                spans=tuple(_thin(spans[index])) if index < len(spans) else (),
            )
            for index, device in enumerate(prediction.devices[:_DEVICES])
        ),
        measured=None
        if comparison is None
        else MeasuredSteps(
            steps=comparison.steps,
            step=_both(comparison.step),
            phases=tuple(map(_both, comparison.phases)),
            groups=tuple(map(_both, comparison.groups)),
            drift=comparison.drift,
        ),
    )


def _both(pair: TimePair) -> PredictedAndMeasured:
    return PredictedAndMeasured(name=pair.name, predicted_ms=1e3 * pair.predicted, measured_ms=1e3 * pair.measured)


def _spans(prediction: Prediction) -> list[list[Span]]:
    """The spans of each device, in the order of the devices."""
    lanes: dict[int, list[Span]] = {}
    for event in trace_events(prediction):
        if event["ph"] == "X":
            start = event["ts"] / 1e3
            end = start + event["dur"] / 1e3
            lanes.setdefault(event["pid"], []).append(
                Span(name=event["name"], kind=event["cat"], start_ms=round(start, 6), end_ms=round(end, 6))
            )
    return [lanes[number] for number in sorted(lanes)]


def _thin(spans: Iterable[Span]) -> list[Span]:
    """Merge neighbouring spans of one kind if there are too many."""
    found = list(spans)
    if len(found) <= _SPANS:
        return found
    size = -(-len(found) // _SPANS)
    thin: list[Span] = []
    for kind, group in groupby(found, key=lambda span: span.kind):
        run = list(group)
        for first in range(0, len(run), size):
            part = run[first : first + size]
            name = part[0].name if len(part) == 1 else f"{part[0].name} … {part[-1].name}"
            start, end = min(s.start_ms for s in part), max(s.end_ms for s in part)
            thin.append(Span(name=name, kind=kind, start_ms=start, end_ms=end))
    return thin
