"""The head of a report: its title, the cards, and what was measured of the whole model."""

from __future__ import annotations

from collections import Counter
from html import escape

from bitwright.core import formatting
from bitwright.report.formatting import float_and_quantized, own_accuracy, own_timings
from bitwright.report.page import charts, elements
from bitwright.report.page.charts import Point, front, lower_is_better, points
from bitwright.report.page.elements import card, cell, pair, row, section, table
from bitwright.report.record import Record

_KINDS = {
    "float": "float",
    "quantized": "this run",
    "trial": "a trial of its search",
    "other": "other runs and runtimes",
}


def header(record: Record) -> str:
    """Title and what the run was."""
    when = record.created.replace("T", " ").removesuffix("+00:00")
    about = [f"workload <b>{escape(record.workload)}</b>"]
    if record.backend is not None:
        about.append(f"backend <b>{escape(record.backend)}</b>")
    if record.sites:
        left = len(record.float_operators)
        about.append(f"{len(record.sites)} quantized sites")
        about.append(f"{left} {'operator' if left == 1 else 'operators'} in float")
    about.append(f'<time datetime="{escape(record.created)}">{escape(when)} UTC</time>')
    about.append(f"Bitwright {escape(record.environment.bitwright)}")
    return f"<header><h1>{escape(record.title)}</h1><p>{' · '.join(about)}</p></header>"


def cards(record: Record) -> str:
    """What one wants to know first."""
    found = [*_accuracy_card(record), *_size_card(record), *_latency_card(record), *_parity_card(record)]
    found += [*_tuning_card(record), *_forecast_card(record), *_formats_card(record)]
    return elements.cards(found)


def _accuracy_card(record: Record) -> list[str]:
    if len(record.accuracies) < 2:
        return []
    first, last = record.accuracies[0], own_accuracy(record)
    against = f"{last.change_from(first)}, {first.where} {first.text}"
    samples = "" if last.samples is None else f", {last.samples:,} samples"
    return [card(f"Accuracy ({last.metric})", last.text, against, f"on {last.where}{samples}")]


def _size_card(record: Record) -> list[str]:
    sizes = float_and_quantized(record)
    if sizes is None:
        return []
    before, after = sizes
    share = f"{100 * after.bytes / before.bytes:.0f} % of {formatting.size(before.bytes)}"
    return [card("Size", formatting.size(after.bytes), share, after.name, f"against {before.name}")]


def _latency_card(record: Record) -> list[str]:
    quantized = [timing for timing in own_timings(record) if timing.variant == "quantized"]
    if not quantized:
        return _ratio_card(record)
    one = quantized[0]
    alike = [t for t in quantized if (t.runtime, t.threads) == (one.runtime, one.threads)]
    threads = "1 thread" if one.threads == 1 else f"{one.threads} threads"
    lines = [f"{t.ratio:.2f}× float, batch {t.batch}" for t in alike]
    return [card(f"Latency, batch {one.batch}", f"{one.median_ms:.3g} ms", *lines, f"{one.runtime}, {threads}")]


def _ratio_card(record: Record) -> list[str]:
    """What a search knows of its best: how long it takes beside float, but no milliseconds."""
    trials = () if record.tuning is None else record.tuning.trials
    best = next((trial for trial in trials if trial.best and trial.latency_ratio is not None), None)
    if best is None:
        return []
    return [card("Latency", f"{best.latency_ratio:.2f}×", "the time of float", f"trial {best.number}, the chosen one")]


def _parity_card(record: Record) -> list[str]:
    if not record.parities:
        return []
    good = all(parity.passed for parity in record.parities)
    agreement = [p.top1_agreement for p in record.parities if p.top1_agreement is not None]
    lines = [f"on {', '.join(p.runtime for p in record.parities)}"]
    if agreement:
        lines.append(f"same top-1 for {100 * min(agreement):.4g} %")
    value = "✓ agrees" if good else "✗ diverges"
    return [card("Runtime parity", value, *lines, tone="good" if good else "bad")]


def _tuning_card(record: Record) -> list[str]:
    tuning = record.tuning
    if tuning is None:
        return []
    value = {True: "✓ holds", False: "✗ missed", None: "not checked"}[tuning.met_goal]
    tone = {True: "good", False: "bad", None: ""}[tuning.met_goal]
    lines = (tuning.goal, f"{len(tuning.trials)} trials, {tuning.full_evaluations} whole evaluations")
    return [card("Goal", value, *lines, tone=tone)]


def _forecast_card(record: Record) -> list[str]:
    if not record.forecasts:
        return []
    one = record.forecasts[-1]
    lines = [f"{one.samples_per_second:,.0f} samples per second, predicted"]
    if one.measured is not None:
        both = one.measured.step
        lines.append(
            f"measured {both.measured_ms:.3g} ms ({formatting.relative_error(both.predicted_ms, both.measured_ms)})"
        )
    return [card(f"Training step, {one.name}", f"{one.step_ms:.3g} ms", *lines)]


def _formats_card(record: Record) -> list[str]:
    """How many sites have which format."""
    if not record.sites:
        return []
    counts = Counter(site.format.partition("/")[0] for site in record.sites)
    lines = [f"{count} × {name}" for name, count in counts.most_common(4)]
    left = len(record.float_operators)
    lines.append(f"{left} {'operator' if left == 1 else 'operators'} in float")
    return [card("Quantized sites", str(len(record.sites)), " · ".join(lines[:-1]), lines[-1])]


def tradeoff(record: Record) -> str:
    """Accuracy against latency, and against size, as far as they were measured."""
    variants = points(record)
    if len(variants) < 2:
        return ""
    charts_ = [_tradeoff(record, variants, "ratio"), _tradeoff(record, variants, "size")]
    if not any(charts_):
        return ""
    way = "Down" if lower_is_better(record) else "Up"
    note = f"{way} and to the left is better. A filled point is one that nothing beats in both at once."
    kinds = {one.kind for one in variants}
    keys = "".join(f'<span><i class="key {kind}"></i>{name}</span>' for kind, name in _KINDS.items() if kind in kinds)
    legend = f'<p class="legend">{keys}</p>' if len(kinds) > 2 else ""
    return section("tradeoff", "Accuracy against latency and size", legend + pair(*charts_), note=note)


def _tradeoff(record: Record, variants: list[Point], cost: str) -> str:
    unit, unit_name = _unit(variants) if cost == "size" else (1.0, "")
    known = [one for one in variants if getattr(one, cost) is not None]
    chosen = sorted(known, key=lambda one: one.kind != "trial")  # what the run is about is drawn over its trials
    if len(chosen) < 2:
        return ""
    metric = record.accuracies[0].metric if record.accuracies else record.tuning.metric if record.tuning else "metric"
    corners = front(chosen, "size" if cost == "size" else "ratio", lower=lower_is_better(record))
    few = sum(one.kind != "trial" for one in chosen) <= 8
    dots = [
        charts.Dot(
            x=getattr(one, cost) / unit,
            y=one.score,
            name=one.name,
            words=_words(one, metric),
            kind=f"{one.kind}{' best' if (float(getattr(one, cost)), one.score) in corners else ''}",
            label=one.kind in ("float", "quantized") or (few and one.kind != "trial"),
        )
        for one in chosen
    ]
    limit = record.tuning.limit if record.tuning is not None else None
    chart = charts.scatter(
        dots,
        x_name=f"size, {unit_name}" if cost == "size" else "latency, relative to float",
        y_name=f"{metric}, %" if metric.startswith("top") else metric,
        label=f"{metric} against {'size' if cost == 'size' else 'latency'}",
        front=[(x / unit, y) for x, y in corners],
        limit=limit,
        limit_name="" if limit is None else f"goal: {limit:.4g}",
        least_y=_least(chosen, metric),
    )
    return f"<div>{chart}</div>"


def _least(chosen: list[Point], metric: str) -> float:
    """One point of a percentage, else a hundredth of the score: less is noise."""
    return 1.0 if metric.startswith("top") else max(abs(one.score) for one in chosen) / 100 or 1.0


def _unit(variants: list[Point]) -> tuple[float, str]:
    largest = max((one.size for one in variants if one.size is not None), default=0)
    for power, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if largest >= power:
            return power, name
    return 1.0, "B"


def _words(one: Point, metric: str) -> str:
    parts = [f"{metric} {one.score:.4g}"]
    if one.ratio is not None:
        parts.append(f"{one.ratio:.2f}× the time of float")
    if one.size is not None:
        parts.append(formatting.size(one.size))
    return ", ".join(parts)


def measured(record: Record) -> str:
    """Accuracy and parity beside latency, where there is room; then where precision is lost."""
    left = _accuracy(record) + _parity(record) + _distance(record)
    right = ""
    if record.timings:
        note = "Medians, float and quantized measured in turns; p10 to p90 in brackets"
        right = section("latency", "Latency", charts.latency(record.timings), note=note)
    return pair(f"<div>{left}</div>" if left else "", right) + _runs(record)


def worst(record: Record) -> str:
    """The sites that lose most."""
    if not any(site.sqnr_db is not None for site in record.sites):
        return ""
    note = (
        "Quantization noise at the sites with the most of it, relative to the signal (RMS), and as signal-to-noise "
        "ratio: the error of that quantizer alone"
    )
    return section("worst", "Where precision is lost", charts.worst_sites(record.sites), note=note)


def _accuracy(record: Record) -> str:
    if not record.accuracies:
        return ""
    first = record.accuracies[0]
    rows = [
        row(
            cell(one.where),
            cell(one.text, value=one.value),
            cell("" if one is first else one.change_from(first), value=one.value - first.value),
        )
        for one in record.accuracies
    ]
    note = f"{first.samples:,} samples" if first.samples else ""
    return section(
        "accuracy", "Accuracy", table(["Run by", f"#{first.metric}", "#Change"], rows, label="Accuracy"), note=note
    )


def _parity(record: Record) -> str:
    if not record.parities:
        return ""
    rows = [
        row(
            cell(one.runtime),
            cell("✓ agrees" if one.passed else "✗ diverges", tone="good" if one.passed else "bad"),
            cell(formatting.decibels(one.sqnr_db), value=one.sqnr_db or 1e9),
            cell(f"{one.max_error:.3g}", value=one.max_error),
            cell(one.first_divergence or "none", code=bool(one.first_divergence)),
        )
        for one in record.parities
    ]
    heads = ["Runtime", "Outputs", "#SQNR", "#Largest error", "First diverging site"]
    note = f"The artefact on the real runtime against the simulated model, {record.parities[0].samples:,} samples"
    return section("parity", "Runtime against simulation", table(heads, rows, label="Parity"), note=note)


def _distance(record: Record) -> str:
    far = record.distance
    if far is None:
        return ""
    agreement = "–" if far.top1_agreement is None else f"{100 * far.top1_agreement:.4g} %"
    rows = [
        row(
            cell("all of the model"),
            cell("✗ far from float" if far.far else "✓ close to float", tone="bad" if far.far else "good"),
            cell(formatting.decibels(far.sqnr_db), value=far.sqnr_db or 1e9),
            cell(agreement, value=far.top1_agreement or 0.0),
        ),
        *(
            row(
                cell(site, code=True),
                cell("this site alone"),
                cell(formatting.decibels(db), value=db or 1e9),
                cell("–"),
            )
            for site, db in far.worst.items()
        ),
    ]
    heads = ["Where", "Verdict", "#SQNR", "#Same top-1"]
    note = f"The simulated model against the float model, {far.samples:,} samples, and the sites with the largest error"
    return section("distance", "Quantized against float", table(heads, rows, label="Distance"), note=note)


def warnings(record: Record) -> str:
    """What to know before anything else."""
    if not record.warnings:
        return ""
    rows = [
        row(cell(one.what, tone="bad"), cell(one.where or "", code=bool(one.where)), cell(one.fix or ""))
        for one in record.warnings
    ]
    return section("warnings", "Warnings", table(["What", "Where", "What to try"], rows, label="Warnings"))


def _runs(record: Record) -> str:
    """Other runs of the workload that were joined."""
    if not record.others:
        return ""
    rows = [
        row(
            cell(one.title),
            cell(one.created[:16].replace("T", " ")),
            cell("–" if one.accuracy is None else one.accuracy.text, value=_value(one.accuracy)),
            cell("–" if one.size is None else formatting.size(one.size.bytes), value=one.size.bytes if one.size else 0),
            cell("–" if one.timing is None else one.timing.ratio_text, value=one.timing.ratio if one.timing else 0.0),
        )
        for one in record.others
    ]
    heads = ["Run", "When", "#Accuracy", "#Size", "#Latency"]
    return section("runs", "Other runs", table(heads, rows, label="Other runs", sortable=True))


def _value(accuracy: object) -> float:
    return float(getattr(accuracy, "value", -1.0))
