"""Charts as inline SVG. Widths are in percent, so that text keeps its size whatever the width of the screen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby, pairwise
from math import ceil, floor, log10
from typing import Literal

from bitwright.bench.comparison import Timing
from bitwright.core.formatting import percent
from bitwright.quantizers.site_statistics import SiteRow
from bitwright.report.formatting import own_accuracy
from bitwright.report.record import Record

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


_STOPS = 16  # points of a chart that the Tab key visits
_MOST = 10  # more bars than this are a table's job
_ROW = 31  # pixels: a line of text and its bar


def latency(timings: Iterable[Timing]) -> str:
    """Float against quantized, a group for each runtime and batch, each on its own scale."""
    parts: list[str] = []
    y = 0
    for (runtime, batch, threads), group in groupby(timings, key=lambda t: (t.runtime, t.batch, t.threads)):
        rows = list(group)
        longest = max(row.median_ms for row in rows)
        title = f"{runtime}, batch {batch}, {threads} {'thread' if threads == 1 else 'threads'}"
        parts.append(f'<text class="head" x="0" y="{y + 14}">{escape(title)}</text>')
        y += 23
        for row in rows:
            value = f"{row.median_ms:.3g} ms ({row.p10_ms:.3g} … {row.p90_ms:.3g})"
            name = row.variant if row.variant == "float" else f"{row.variant}, {row.ratio:.2f}×"
            parts.append(_bar(y, name, value, row.median_ms / longest, row.variant))
            y += _ROW
        y += 12
    return svg(parts, y - 12, "Latency: float against quantized")


def worst_sites(rows: Iterable[SiteRow]) -> str:
    """The sites with the lowest SQNR; a bar is as long as the noise, so the worst has the longest."""
    known = sorted((row.sqnr_db, row.site) for row in rows if row.sqnr_db is not None and row.share is None)
    shown = known[:_MOST]
    most = 10 ** (-shown[0][0] / 20) if shown else 1.0
    parts = [
        _bar(_ROW * index, site, f"{percent(noise)} · {sqnr:.1f} dB", noise / most, "quantized")
        for index, (sqnr, site) in enumerate(shown)
        for noise in (10 ** (-sqnr / 20),)
    ]
    return svg(parts, _ROW * len(shown), "The sites with the most quantization noise, relative to their signal")


@dataclass(frozen=True, kw_only=True)
class Dot:
    """A point of a scatter chart."""

    x: float
    y: float
    name: str
    words: str
    kind: str
    label: bool = False


def scatter(
    dots: Sequence[Dot],
    *,
    x_name: str,
    y_name: str,
    label: str,
    front: Sequence[tuple[float, float]] = (),
    limit: float | None = None,
    limit_name: str = "",
    least_y: float = 1.0,
    counted: bool = False,
) -> str:
    """Points over two axes. `front` is drawn as steps; a `limit` is a line that y shouldn't cross.

    A `counted` x is a number of something: whole, and not from zero.
    """
    height, top, bottom, left = 280, 22, 34, 11.0
    xs = [dot.x for dot in dots] + ([] if counted else [0.0])
    ys = [dot.y for dot in dots] + ([] if limit is None else [limit])
    x_ticks, y_ticks = (
        ticks(min(xs), max(xs), 5, least=1.0 if counted else 0.0),
        ticks(*_padded(min(ys), max(ys), least_y), 5),
    )
    (x0, x1), (y0, y1) = (x_ticks[0], x_ticks[-1]), (y_ticks[0], y_ticks[-1])

    def px(x: float) -> str:
        return f"{left + (97.0 - left) * (x - x0) / ((x1 - x0) or 1.0):.2f}%"

    def py(y: float) -> float:
        return round(height - bottom - (height - bottom - top) * (y - y0) / ((y1 - y0) or 1.0), 1)

    parts = [f'<text class="soft" x="0" y="11">{escape(y_name)}</text>']
    for tick in y_ticks:
        parts.append(f'<line class="grid" x1="{left}%" x2="100%" y1="{py(tick)}" y2="{py(tick)}"/>')
        parts.append(f'<text class="soft" x="{left - 1}%" y="{py(tick) + 4}" text-anchor="end">{tick:g}</text>')
    for tick in x_ticks:
        parts.append(
            f'<text class="soft" x="{px(tick)}" y="{height - bottom + 17}" text-anchor="middle">{tick:g}</text>'
        )
    parts.append(f'<text class="soft" x="100%" y="{height - 2}" text-anchor="end">{escape(x_name)}</text>')
    if limit is not None:
        y = py(limit)
        parts.append(f'<line class="limit" x1="{left}%" x2="100%" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="limit" x="100%" y="{y - 5}" text-anchor="end">{escape(limit_name)}</text>')
    for (ax, ay), (bx, by) in pairwise(front):
        parts.append(f'<line class="front" x1="{px(ax)}" x2="{px(bx)}" y1="{py(ay)}" y2="{py(ay)}"/>')
        parts.append(f'<line class="front" x1="{px(bx)}" x2="{px(bx)}" y1="{py(ay)}" y2="{py(by)}"/>')
    # Each point tells itself by the keyboard; a hundred of them are read in their table instead.
    stop = ' tabindex="0"' if len(dots) <= _STOPS else ""
    names: list[str] = []
    for dot in dots:
        words = escape(f"{dot.name}: {dot.words}")
        parts.append(
            f'<circle class="dot {dot.kind}" cx="{px(dot.x)}" cy="{py(dot.y)}" r="5.5"{stop} role="img" '
            f'aria-label="{words}" data-tip="{words}"/>'
        )
        if dot.label:
            names.append(_label(dot, px(dot.x), py(dot.y), (dot.x - x0) / ((x1 - x0) or 1.0)))
    # Names over all points: none is overprinted by a later one.
    return svg([*parts, *names], height, label, kind="scatter")


def _label(dot: Dot, x: str, y: float, share: float) -> str:
    """A name beside its point, on the side where there is room.

    How wide it is, and whether it meets others, is known on the screen only: `page.js` moves it to where it is free.
    """
    side = 'text-anchor="end" dx="-10"' if share > 0.6 else 'dx="10"'
    return f'<text class="name" data-x="{x}" data-y="{y}" x="{x}" y="{y + 4}" {side}>{escape(dot.name)}</text>'


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A piece of a lane."""

    start: float
    end: float
    name: str
    kind: str


def lanes(rows: Sequence[tuple[str, Sequence[Bar]]], *, end: float, unit: str, label: str) -> str:
    """Named lanes over one axis of time; a bar that is wide enough has its name in it."""
    parts: list[str] = []
    y = 0
    total = ticks(0.0, end, 6)
    for name, bars in rows:
        parts.append(f'<text class="soft" x="0" y="{y + 12}">{escape(name)}</text>')
        y += 18
        parts.append(f'<rect class="rail" x="0" y="{y}" width="100%" height="20" rx="3"/>')
        for bar in bars:
            start, width = 100 * bar.start / end, 100 * (bar.end - bar.start) / end
            words = escape(f"{bar.name}: {bar.end - bar.start:.3g} {unit}")
            parts.append(
                f'<rect class="span {escape(bar.kind)}" x="{start:.3f}%" y="{y}" width="{max(width, 0.05):.3f}%" '
                f'height="20" data-tip="{words}"><title>{words}</title></rect>'
            )
            if width > 1.4 * len(bar.name) + 2:
                parts.append(f'<text class="in" x="{start:.3f}%" dx="6" y="{y + 14}">{escape(bar.name)}</text>')
        y += 30
    for tick in total:
        if tick <= end:
            share = 100 * tick / end
            anchor = "start" if share < 3 else "end" if share > 96 else "middle"
            parts.append(f'<line class="tick" x1="{share:.2f}%" x2="{share:.2f}%" y1="{y - 6}" y2="{y - 2}"/>')
            parts.append(
                f'<text class="soft" x="{share:.2f}%" y="{y + 10}" text-anchor="{anchor}">{tick:g} {unit}</text>'
            )
    return svg(parts, y + 14, label, kind="lanes")


def ticks(low: float, high: float, count: int, *, least: float = 0.0) -> list[float]:
    """Round numbers from at most `low` to at least `high`, no nearer to each other than `least`.

    >>> ticks(0, 1.07, 5)
    [0.0, 0.25, 0.5, 0.75, 1.0, 1.25]
    >>> ticks(1, 3, 5, least=1.0)
    [1.0, 2.0, 3.0]
    >>> ticks(98.7, 99.4, 5)
    [98.6, 98.8, 99.0, 99.2, 99.4]
    """
    span = (high - low) or abs(high) or 1.0
    rough = max(span / count, least)
    unit = 10 ** floor(log10(rough))
    factors = (1, 2, 5, 10) if least else (1, 2, 2.5, 5, 10)
    step = next(unit * factor for factor in factors if unit * factor >= rough * (1 - 1e-9))
    first, last = floor(low / step + 1e-9), ceil(high / step - 1e-9)
    return [round(float(number * step), 10) for number in range(first, max(last, first + 1) + 1)]


def _padded(low: float, high: float, least: float) -> tuple[float, float]:
    """A span that doesn't make noise look like a cliff."""
    missing = max(0.0, least - (high - low)) / 2
    return low - missing, high + missing


def _bar(y: int, name: str, value: str, share: float, kind: str) -> str:
    """Name on the left and value on the right of a line, the bar under it."""
    short = name if len(name) <= 44 else f"…{name[-43:]}"
    return (
        f'<text x="0" y="{y + 12}">{escape(short)}<title>{escape(name)}</title></text>'
        f'<text class="soft" x="100%" y="{y + 12}" text-anchor="end">{escape(value)}</text>'
        f'<rect class="rail" x="0" y="{y + 17}" width="100%" height="7" rx="3.5"/>'
        f'<rect class="{kind}" x="0" y="{y + 17}" width="{100 * max(share, 0.0):.2f}%" height="7" rx="3.5"/>'
    )


def svg(parts: list[str], height: int, label: str, *, kind: str = "bars") -> str:
    """A drawing with a name for those who don't see it."""
    return f'<svg class="{kind}" height="{height}" role="group" aria-label="{escape(label)}">{"".join(parts)}</svg>'
