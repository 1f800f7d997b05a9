"""Accuracy against latency and size: every variant that a record knows, and the front of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bitwright.report.record import Record, Timing
from bitwright.report.words import own_accuracy

Kind = Literal["float", "quantized", "trial", "other"]


@dataclass(frozen=True, kw_only=True)
class Point:
    """One variant of the model."""

    name: str
    kind: Kind
    score: float
    ratio: float | None
    """Latency, relative to float in the same run."""
    size: int | None


def points(record: Record) -> list[Point]:
    """All variants with a metric, of this run, its search, the runtimes that were compared, and other runs."""
    return [*_own(record), *_compared(record), *_trials(record), *_others(record)]


def lower_is_better(record: Record) -> bool:
    """Whether less of the metric is better, as whoever measured it said."""
    tuned = () if record.tuning is None else (record.tuning.lower_is_better,)
    compared = () if record.comparison is None else record.comparison.runtimes
    return any((*(one.lower_is_better for one in record.accuracies), *tuned)) or any(
        one.lower_is_better for row in compared for one in row.accuracies[:1]
    )


def front(variants: list[Point], cost: Literal["ratio", "size"], *, lower: bool = False) -> list[tuple[float, float]]:
    """What nothing beats in score and this cost at once, from cheap to dear; `lower`: less of the score is better."""
    sign = -1.0 if lower else 1.0
    known = sorted((float(value), -sign * one.score) for one in variants if (value := getattr(one, cost)) is not None)
    corners: list[tuple[float, float]] = []
    for value, negative in known:
        if not corners or -negative > sign * corners[-1][1]:
            corners.append((value, -sign * negative))
    return corners


def _own(record: Record) -> list[Point]:
    if not record.accuracies:
        return []
    first = record.accuracies[0]
    float_size, size = (record.sizes[0].bytes, record.sizes[-1].bytes) if len(record.sizes) > 1 else (None, None)
    found: list[Point] = []
    if first.where == "float":
        found.append(Point(name="float", kind="float", score=first.value, ratio=1.0, size=float_size))
    by_place = {accuracy.where: accuracy.value for accuracy in record.accuracies[1:]}
    if not by_place:
        return found
    timings = _first_batch(record.timings)
    for timing in timings:
        score = by_place.get(timing.runtime, list(by_place.values())[-1])
        found.append(
            Point(name=f"quantized, {timing.runtime}", kind="quantized", score=score, ratio=timing.ratio, size=size)
        )
    if not timings:
        own = own_accuracy(record)
        found.append(Point(name=f"quantized, {own.where}", kind="quantized", score=own.value, ratio=None, size=size))
    return found


def _first_batch(timings: tuple[Timing, ...]) -> list[Timing]:
    """Of each runtime the quantized variant at the first batch size: others are in the latency chart."""
    found: dict[str, Timing] = {}
    for timing in timings:
        if timing.variant == "quantized":
            found.setdefault(timing.runtime, timing)
    return list(found.values())


def _compared(record: Record) -> list[Point]:
    """Runtimes of one comparison were measured in turns: all are relative to the float artefact of the first one."""
    if record.comparison is None:
        return []
    found: list[Point] = []
    reference: float | None = None
    for row in record.comparison.runtimes:
        scores: dict[str, float] = {}
        for one in row.accuracies:
            scores.setdefault(one.where, one.value)  # the workload's own metric is the first
        sizes = {one.name: one.bytes for one in row.sizes}
        batch = min((one.batch for one in row.timings), default=None)
        times = {one.variant: one.median_ms for one in row.timings if one.batch == batch}
        reference = reference or times.get("float")
        for variant in ("float", "quantized"):
            if variant in scores:
                ratio = times[variant] / reference if variant in times and reference else None
                name = f"{variant}, {row.runtime} (bench)"
                kind: Kind = "float" if variant == "float" else "other"
                found.append(Point(name=name, kind=kind, score=scores[variant], ratio=ratio, size=sizes.get(variant)))
    return found


def _trials(record: Record) -> list[Point]:
    """Candidates that took a whole evaluation; the chosen one is the run's own model."""
    tuning = record.tuning
    if tuning is None:
        return []
    return [
        Point(
            name=f"trial {trial.number}",
            kind="trial",
            score=trial.metrics[tuning.metric],
            ratio=trial.latency_ratio,
            size=trial.size,
        )
        for trial in tuning.trials
        if tuning.metric in trial.metrics and not trial.stopped and trial.failed is None
    ]


def _others(record: Record) -> list[Point]:
    metric = record.accuracies[0].metric if record.accuracies else None
    return [
        Point(
            name=row.title,
            kind="other",
            score=row.accuracy.value,
            ratio=None if row.timing is None else row.timing.ratio,
            size=None if row.size is None else row.size.bytes,
        )
        for row in record.others
        if row.accuracy is not None and metric in (None, row.accuracy.metric)
    ]
