"""The HTML page of a report, and the frame and templates of all pages."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from bitwright.bench.comparison import Comparison, LatencyRow, OnRuntime, latency_chart
from bitwright.cluster import MemoryLimit
from bitwright.core import formatting
from bitwright.core.files import yaml_text
from bitwright.quantizers.site_statistics import SiteRow
from bitwright.reports.charts import (
    adaptive_chart,
    lower_is_better,
    points,
    timelines,
    tradeoff_charts,
    training_chart,
    tuning_chart,
    worst_sites_chart,
)
from bitwright.reports.record import (
    Record,
    environment_facts,
    executed_sites,
    float_and_quantized,
    observed_range,
    own_accuracy,
    own_timings,
    ranges,
    row_facts,
)
from bitwright.reports.sections import ForecastDevice, MeasuredSteps, PredictedAndMeasured


@dataclass(frozen=True, kw_only=True)
class Card:
    """One figure at the top of a page."""

    title: str
    value: str
    lines: Sequence[str] = ()
    tone: str = ""


@cache
def templates() -> Environment:
    """The templates of this package; values are escaped."""
    made = Environment(
        loader=PackageLoader("bitwright.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        size=formatting.size,
        counted=formatting.counted,
        decibels=formatting.decibels,
        percent=formatting.percent,
        number=formatting.number,
        repr=repr,
        yaml=yaml_text,
        port=port,
        hashed=lambda name: f"#{name}",
        reasons=_reasons,
    )
    made.globals.update(span=formatting.span, relative_error=formatting.relative_error)
    return made


def port(site: str) -> str:
    """The kind of a site: `input` for `add#0:input1`."""
    return site.rpartition(":")[2].rstrip("0123456789") or "site"


def _reasons(skipped: Mapping[str, str]) -> str:
    return "; ".join(f"{site}: {why}" for site, why in skipped.items())


def all_and(values: Iterable[Any]) -> list[tuple[str, str]]:
    """Options of a filter: all, and each value."""
    return [("", "all"), *((str(value), str(value)) for value in sorted(set(values)))]


def render(template: str, **values: Any) -> Markup:
    """A template of this package, filled in."""
    return Markup(templates().get_template(f"{template}.html.jinja").render(**values))


def document(title: str, body: Markup, *, data: str, nav: Iterable[tuple[str, str]], scripts: Iterable[str]) -> str:
    """A whole page. `scripts` are assets that read `data`, which is JSON; `nav` has ids and names of sections."""
    return render(
        "page",
        title=title,
        body=body,
        nav=nav,
        css=_asset("page.css"),
        script=Markup("\n").join(map(_asset, ("page.js", *scripts))),
        # Only "<" could end the script element; as an escape it is the same JSON.
        data=Markup(data.replace("<", "\\u003c")),
    )


def _asset(name: str) -> Markup:
    return Markup(files("bitwright.reports").joinpath("assets", name).read_text(encoding="utf-8"))


_KINDS = {
    "float": "float",
    "quantized": "this run",
    "trial": "a trial of the search",
    "other": "other runs and runtimes",
}
# The sections that the bar at the top links to.
_NAV = {
    "warnings": "Warnings",
    "tradeoff": "Trade-off",
    "accuracy": "Accuracy",
    "latency": "Latency",
    "ran": "What ran",
    "graph": "Graph",
    "sites": "Plan",
    "float": "Float",
    "tuning": "Tuning",
    "training": "Training",
    "ranks": "Ranks",
    "devices-0": "Devices",
    "runtimes": "Runtimes",
    "environment": "Environment",
}


def page(record: Record) -> str:
    """The text of the page; sections without data are left out."""
    kinds = {one.kind for one in points(record)}
    scores = () if record.sensitivity is None else record.sensitivity.sites
    body = render(
        "report",
        record=record,
        created=record.created.replace("T", " ").removesuffix("+00:00"),
        summary=list(summary_cards(record)),
        tradeoff=tradeoff_charts(record),
        legend=[(kind, name) for kind, name in _KINDS.items() if kind in kinds],
        lower_is_better=lower_is_better(record),
        measures=list(measures(record)),
        output_errors={one.site: one.output_error for one in scores},
        has_noise=any(site.sqnr_db is not None for site in record.sites),
        adaptive_chart=adaptive_chart,
        all_and=all_and,
        compared=compared,
        environment_facts=environment_facts,
        executed_sites=executed_sites,
        latency_chart=latency_chart,
        memory_limit=memory_limit,
        method=method,
        ranges=ranges,
        row_facts=row_facts,
        runtime_rows=runtime_rows,
        observed_range=observed_range,
        timelines=timelines,
        training_chart=training_chart,
        tuning_chart=tuning_chart,
        worst_sites_chart=worst_sites_chart,
    )
    sections = set(re.findall(r'<section id="([\w-]+)"', body))
    nav = [(anchor, name) for anchor, name in _NAV.items() if anchor in sections]
    return document(record.title, body, data=record.model_dump_json(), nav=nav, scripts=("sites.js", "graph.js"))


def summary_cards(record: Record) -> Iterator[Card]:
    """The most important figures."""
    if len(record.accuracies) > 1:
        first, last = record.accuracies[0], own_accuracy(record)
        against = f"{last.change_from(first)}, {first.where} {first.text}"
        samples = "" if last.samples is None else f", {formatting.counted(last.samples, 'sample')}"
        lines = [against, f"on {last.where}{samples}"]
        yield Card(title=f"Accuracy ({last.metric})", value=last.text, lines=lines)
    sizes = float_and_quantized(record)
    if sizes is not None:
        before, after = sizes
        share = f"{100 * after.bytes / before.bytes:.0f} % of {formatting.size(before.bytes)}"
        lines = [share, after.name, f"against {before.name}"]
        yield Card(title="Size", value=formatting.size(after.bytes), lines=lines)
    yield from _latency_card(record)
    yield from _parity_card(record)
    yield from _tuning_card(record)
    yield from _forecast_card(record)
    yield from _formats_card(record)


def _latency_card(record: Record) -> Iterator[Card]:
    quantized = [timing for timing in own_timings(record) if timing.variant == "quantized"]
    if quantized:
        one = quantized[0]
        alike = [t for t in quantized if (t.runtime, t.threads) == (one.runtime, one.threads)]
        lines = [f"{t.ratio:.2f}× float, batch {t.batch}{t.doubt_text}" for t in alike]
        lines.append(f"{one.runtime}, {formatting.counted(one.threads, 'thread')}")
        yield Card(title=f"Latency, batch {one.batch}", value=f"{one.median_ms:.3g} ms", lines=lines)
        return
    trials = () if record.tuning is None else record.tuning.trials
    best = next((trial for trial in trials if trial.best and trial.latency_ratio is not None), None)
    if best is not None:  # a search measures ratios, not milliseconds
        lines = ["the time of float", f"trial {best.number}, the chosen one"]
        yield Card(title="Latency", value=f"{best.latency_ratio:.2f}×", lines=lines)


def _parity_card(record: Record) -> Iterator[Card]:
    if not record.parities:
        return
    good = all(parity.passed for parity in record.parities)
    agreement = [p.top1_agreement for p in record.parities if p.top1_agreement is not None]
    lines = [f"on {', '.join(p.runtime for p in record.parities)}"]
    if agreement:
        lines.append(f"same top-1 for {100 * min(agreement):.4g} %")
    value, tone = ("✓ agrees", "good") if good else ("✗ diverges", "bad")
    yield Card(title="Runtime parity", value=value, lines=lines, tone=tone)


def _tuning_card(record: Record) -> Iterator[Card]:
    tuning = record.tuning
    if tuning is None:
        return
    value = {True: "✓ holds", False: "✗ missed", None: "not checked"}[tuning.met_goal]
    tone = {True: "good", False: "bad", None: ""}[tuning.met_goal]
    trials = formatting.counted(len(tuning.trials), "trial")
    lines = [tuning.goal, f"{trials}, {formatting.counted(tuning.full_evaluations, 'whole evaluation')}"]
    if any(trial.best and (trial.latency_ratio or 0.0) >= 1.0 for trial in tuning.trials):
        lines.append("the float model is faster")
    yield Card(title="Goal", value=value, lines=lines, tone=tone)


def _forecast_card(record: Record) -> Iterator[Card]:
    if not record.forecasts:
        return
    one = record.forecasts[-1]
    lines = [f"{one.samples_per_second:,.0f} samples per second, predicted"]
    if one.measured is not None:
        both = one.measured.step
        error = formatting.relative_error(both.predicted_ms, both.measured_ms)
        lines.append(f"measured {both.measured_ms:.3g} ms ({error})")
    yield Card(title=f"Training step, {one.name}", value=f"{one.step_ms:.3g} ms", lines=lines)


def _formats_card(record: Record) -> Iterator[Card]:
    if record.sites:
        counts = Counter(site.format.partition("/")[0] for site in record.sites)
        formats = " · ".join(f"{count} × {name}" for name, count in counts.most_common(4))
        in_float = f"{formatting.counted(len(record.float_operators), 'operator')} in float"
        yield Card(title="Quantized sites", value=str(len(record.sites)), lines=[formats, in_float])


def measures(record: Record) -> Iterator[tuple[str, str]]:
    """What the graph can be coloured by: keys that `graph.js` knows, and their names."""
    if record.sensitivity is not None:
        if any(site.loss_change is not None for site in record.sensitivity.sites):
            yield "loss_change", "change of the loss if quantized alone"
        yield "output_error", "error of the outputs if quantized alone"
    if any(site.sqnr_db is not None for site in record.sites):
        yield "sqnr_db", "own noise (SQNR)"
    if any(site.clipped is not None for site in record.sites):
        yield "clipped", "clipped share"
    if record.sites:
        yield "bits", "bits"
    if any(node.macs for node in record.graph):
        yield "macs", "multiply-accumulates"


def method(site: SiteRow) -> str:
    """How the grid of a site was found."""
    name = site.observer if site.quantizer == "plain" else site.quantizer
    name = name if site.share is None else f"grid of {site.share}"
    return f"{name}, guard {site.guard}" if site.guard else name


def memory_limit(device: ForecastDevice) -> MemoryLimit | None:
    """The memory that a device has; None: not known."""
    if device.memory_limit is None:
        return None
    return MemoryLimit(total=device.memory_limit, reserve=device.memory_reserve)


def compared(found: MeasuredSteps) -> list[tuple[str, PredictedAndMeasured]]:
    """Predicted and measured times of a step; parts below a thousandth of the step are left out."""
    parts = [("step", found.step), *(("phase", one) for one in found.phases), *(("operators", o) for o in found.groups)]
    least = found.step.measured_ms / 1000
    return [(part, one) for part, one in parts if max(one.predicted_ms, one.measured_ms) > least]


def runtime_rows(found: Comparison) -> list[tuple[OnRuntime, str, int, LatencyRow | None]]:
    """Runtime, variant, batch and timing; a runtime that was not timed has one row."""
    rows: list[tuple[OnRuntime, str, int, LatencyRow | None]] = []
    for one in found.runtimes:
        timings = sorted(one.timings, key=lambda timing: (timing.batch, timing.variant))
        rows += [(one, timing.variant, timing.batch, timing) for timing in timings]
        if not timings:
            rows.append((one, "quantized", 0, None))
    return rows
