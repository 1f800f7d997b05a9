"""The charts of a report page: trade-offs, timelines, and the course of tuning and training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

from bitwright.bench.comparison import LatencyRow
from bitwright.core import display, formatting
from bitwright.quantizers.site_statistics import SiteRow
from bitwright.reports.record import Record, own_accuracy
from bitwright.reports.sections import AdaptiveRecord, Forecast, ForecastDevice, TrainingRecord, TuningRecord

_WORST_SITES = 10
PointKind = Literal["float", "quantized", "trial", "other"]
CostAxis = Literal["ratio", "size"]


@dataclass(frozen=True, kw_only=True)
class Point:
    """One variant of the model."""

    name: str
    kind: PointKind
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


def front(variants: list[Point], cost: CostAxis, *, lower: bool = False) -> list[tuple[float, float]]:
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
                kind: PointKind = "float" if variant == "float" else "other"
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


def _chart(record: Record, variants: list[Point], cost: CostAxis) -> Markup | None:
    unit, unit_name = _unit(variants) if cost == "size" else (1.0, "")
    known = [one for one in variants if getattr(one, cost) is not None]
    chosen = sorted(known, key=lambda one: one.kind != "trial")  # trials are drawn first, below the others
    if len(chosen) < 2:
        return None
    metric = record.accuracies[0].metric if record.accuracies else record.tuning.metric if record.tuning else "metric"
    corners = front(chosen, cost, lower=lower_is_better(record))
    few = sum(one.kind != "trial" for one in chosen) <= 8
    dots = [
        display.Dot(
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
    return display.scatter(
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


def timelines(found: Forecast) -> Iterator[tuple[str, Markup]]:
    """A title and a drawing for each kind of device; devices without times are left out."""
    for index, device in enumerate(found.devices):
        drawing = _timeline(found, device, first=index == 0)
        if drawing is not None:
            yield _title(device), drawing


def _title(device: ForecastDevice) -> str:
    return device.name if device.count == 1 else f"{device.name} × {device.count}"


def _timeline(found: Forecast, device: ForecastDevice, *, first: bool) -> Markup | None:
    """Predicted phases, operators and collectives above the measured phases, on one time axis."""
    predicted = phases(device)
    lanes: list[tuple[str, list[display.Bar]]] = [("predicted", predicted)]
    compute = [s for s in device.spans if s.kind != "collective"]
    if compute:
        lanes.append(
            (
                "operators",
                [display.Bar(start=s.start_ms, end=s.end_ms, name=s.name, kind=f"op {s.kind}") for s in compute],
            )
        )
    sent = [s for s in device.spans if s.kind == "collective"]
    if sent:
        lanes.append(
            ("collectives", [display.Bar(start=s.start_ms, end=s.end_ms, name=s.name, kind="collective") for s in sent])
        )
    if found.measured is not None and first:
        lanes.append(("measured", _stacked(_in_order((b.name, b.measured_ms) for b in found.measured.phases))))
    end = max((bar.end for _, bars in lanes for bar in bars), default=0.0)
    if end <= 0:
        return None
    return display.lanes(lanes, end=end, unit="ms", label=f"Timeline of {_title(device)}")


def phases(device: ForecastDevice) -> list[display.Bar]:
    """The phases on the time axis of the operators, with the wait between backward and optimizer."""
    hull: dict[str, tuple[float, float]] = {}
    for span in device.spans:
        start, end = hull.get(span.kind, (span.start_ms, span.end_ms))
        hull[span.kind] = min(start, span.start_ms), max(end, span.end_ms)
    times = device.phases_ms
    if not {"forward", "backward", "tail"} <= set(hull):
        return _stacked(_in_order(times.items()))
    (begins, forward), (_, backward), (tail, end) = (hull[kind] for kind in ("forward", "backward", "tail"))
    loss = min(forward + times.get("loss", 0.0), backward)
    # With gradient accumulation, the operators are those of the last batch.
    before = "earlier batches" if begins > 1.5 * times.get("other", 0.0) else "other"
    marks = [("other", before, 0.0, begins), ("forward", "forward", begins, forward), ("loss", "loss", forward, loss)]
    marks += [("backward", "backward", loss, backward), ("wait", "waits", backward, tail)]
    at = tail
    for name in ("clip", "optimizer"):
        last = end if name == "optimizer" else min(at + times.get(name, 0.0), end)
        marks.append((name, name, at, last))
        at = last
    least = end / 1e4  # rounding
    return [
        display.Bar(start=start, end=stop, name=name, kind=f"phase {kind}")
        for kind, name, start, stop in marks
        if stop - start > least
    ]


def _in_order(items: Iterable[tuple[str, float]]) -> list[tuple[str, float]]:
    """Time outside of all phases comes first, as in the prediction."""
    return sorted(items, key=lambda item: item[0] != "other")


def _stacked(items: Iterable[tuple[str, float]]) -> list[display.Bar]:
    bars: list[display.Bar] = []
    at = 0.0
    for name, length in items:
        if length > 0:
            bars.append(display.Bar(start=at, end=at + length, name=name, kind=f"phase {name}"))
        at += length
    return bars


def worst_sites_chart(rows: Iterable[SiteRow]) -> Markup:
    """The sites with the lowest SQNR; the length of a bar is the relative noise."""
    known = sorted((row.sqnr_db, row.site) for row in rows if row.sqnr_db is not None and row.share is None)
    shown = known[:_WORST_SITES]
    most = 10 ** (-shown[0][0] / 20) if shown else 1.0
    parts = []
    for index, (sqnr, site) in enumerate(shown):
        noise = 10 ** (-sqnr / 20)
        value = f"{formatting.percent(noise)} · {sqnr:.1f} dB"
        parts.append(display.bar(display.BAR_HEIGHT * index, site, value, noise / most, "quantized"))
    label = "The sites with the most quantization noise, relative to their signal"
    return display.svg(parts, display.BAR_HEIGHT * len(shown), label)


def tuning_chart(found: TuningRecord) -> Markup | str:
    """The metric of each trial."""
    known = [trial for trial in found.trials if found.metric in trial.metrics]
    if len(known) < 2:
        return ""
    dots = [
        display.Dot(
            x=trial.number,
            y=trial.metrics[found.metric],
            name=f"trial {trial.number}",
            text=f"{found.metric} {trial.metrics[found.metric]:.4g}, {trial.candidate}",
            kind=f"trial{' best' if trial.pareto else ''}{' chosen' if trial.best else ''}",
            label=trial.best,
        )
        for trial in known
    ]
    best = max(trial.metrics[found.metric] for trial in known)
    return display.scatter(
        dots,
        x_name="trial",
        y_name=found.metric,
        label="The course of the search",
        limit=found.limit,
        limit_name="" if found.limit is None else f"goal: {found.limit:.4g}",
        least_y=1.0 if found.metric.startswith("top") else abs(best) / 100 or 1.0,
        counted=True,
    )


def training_chart(found: TrainingRecord) -> Markup | str:
    """The metric after each epoch."""
    values = [epoch.get(found.metric) for epoch in found.metrics]
    dots = [
        display.Dot(
            x=number,
            y=value,
            name=f"epoch {number}",
            text=f"{found.metric} {value:.4g}",
            kind=f"trial{' best' if number == found.best_epoch else ''}",
        )
        for number, value in enumerate(values, 1)
        if value is not None
    ]
    if len(dots) < 2:
        return ""
    least = 1.0 if found.metric.startswith("top") else 0.0
    return display.scatter(dots, x_name="epoch", y_name=found.metric, label="Training", least_y=least, counted=True)


_POINTS = 120  # of a rank; more would hide each other


def adaptive_chart(found: AdaptiveRecord) -> Markup | str:
    """The time of a step, what each rank computed of it, and the prediction as a line."""
    rows = found.rows[:: -(-len(found.rows) // _POINTS) or 1]
    if len(rows) < 2:
        return ""
    dots = [
        display.Dot(x=row.step, y=row.step_ms, name="step", text=f"step {row.step}: {row.step_ms:.4g} ms", kind="float")
        for row in rows
    ]
    for rank, name in enumerate(found.ranks):
        own = [row for row in rows if len(row.own_ms) == len(found.ranks)]
        dots += [
            display.Dot(
                x=row.step,
                y=row.own_ms[rank],
                name=name,
                text=f"computes {row.own_ms[rank]:.4g} ms of step {row.step}",
                kind="trial",
                label=row is own[-1],
            )
            for row in own
        ]
    line = [(float(row.step), row.predicted_ms) for row in rows]
    label = "Step time, time that each rank computes, and predicted step time"
    return display.scatter(dots, x_name="step", y_name="ms", label=label, front=line, counted=True)
