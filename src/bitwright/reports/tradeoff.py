"""The charts of accuracy against latency and size: which variants there are, and which of them are best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

from bitwright.bench.comparison import LatencyRow
from bitwright.core import charts, formatting
from bitwright.reports.formatting import own_accuracy
from bitwright.reports.record import Record

Kind = Literal["float", "quantized", "trial", "other"]
Cost = Literal["ratio", "size"]


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
    """All variants with a metric: of this run, its search, the compared runtimes, and other runs."""
    return [*_own(record), *_compared(record), *_trials(record), *_others(record)]


def lower_is_better(record: Record) -> bool:
    """Whether a lower value of the record's metric is better."""
    tuned = () if record.tuning is None else (record.tuning.lower_is_better,)
    compared = () if record.comparison is None else record.comparison.runtimes
    return any((*(one.lower_is_better for one in record.accuracies), *tuned)) or any(
        one.lower_is_better for row in compared for one in row.accuracies[:1]
    )


def front(variants: list[Point], cost: Cost, *, lower: bool = False) -> list[tuple[float, float]]:
    """The variants that no other beats in both score and cost, sorted by cost. `lower`: a lower score is better."""
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


def _first_batch(timings: tuple[LatencyRow, ...]) -> list[LatencyRow]:
    """The quantized variant of each runtime at its first batch size; the latency chart shows the others."""
    found: dict[str, LatencyRow] = {}
    for timing in timings:
        if timing.variant == "quantized":
            found.setdefault(timing.runtime, timing)
    return list(found.values())


def _compared(record: Record) -> list[Point]:
    """Runtimes of a comparison, relative to the float artefact of the first; they were measured in turns."""
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
    """Candidates with a full evaluation."""
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


def tradeoff_charts(record: Record) -> list[Markup]:
    """Accuracy against latency, and against size, if at least two variants have both."""
    variants = points(record)
    found = [_chart(record, variants, "ratio"), _chart(record, variants, "size")]
    return [chart for chart in found if chart is not None]


def _chart(record: Record, variants: list[Point], cost: Cost) -> Markup | None:
    unit, unit_name = _unit(variants) if cost == "size" else (1.0, "")
    known = [one for one in variants if getattr(one, cost) is not None]
    chosen = sorted(known, key=lambda one: one.kind != "trial")  # trials are drawn first, below the others
    if len(chosen) < 2:
        return None
    metric = record.accuracies[0].metric if record.accuracies else record.tuning.metric if record.tuning else "metric"
    corners = front(chosen, cost, lower=lower_is_better(record))
    few = sum(one.kind != "trial" for one in chosen) <= 8
    dots = [
        charts.Dot(
            x=getattr(one, cost) / unit,
            y=one.score,
            name=one.name,
            text=_text(one, metric),
            kind=f"{one.kind}{' best' if (float(getattr(one, cost)), one.score) in corners else ''}",
            label=one.kind in ("float", "quantized") or (few and one.kind != "trial"),
        )
        for one in chosen
    ]
    limit = record.tuning.limit if record.tuning is not None else None
    return charts.scatter(
        dots,
        x_name=f"size, {unit_name}" if cost == "size" else "latency, relative to float",
        y_name=f"{metric}, %" if metric.startswith("top") else metric,
        label=f"{metric} against {'size' if cost == 'size' else 'latency'}",
        front=[(x / unit, y) for x, y in corners],
        limit=limit,
        limit_name="" if limit is None else f"goal: {limit:.4g}",
        least_y=_least(chosen, metric),
    )


def _least(chosen: list[Point], metric: str) -> float:
    """The smallest range of the axis: one percentage point, or a hundredth of the score."""
    return 1.0 if metric.startswith("top") else max(abs(one.score) for one in chosen) / 100 or 1.0


def _unit(variants: list[Point]) -> tuple[float, str]:
    largest = max((one.size for one in variants if one.size is not None), default=0)
    for power, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if largest >= power:
            return power, name
    return 1.0, "B"


def _text(one: Point, metric: str) -> str:
    parts = [f"{metric} {one.score:.4g}"]
    if one.ratio is not None:
        parts.append(f"{one.ratio:.2f}× the time of float")
    if one.size is not None:
        parts.append(formatting.size(one.size))
    return ", ".join(parts)
