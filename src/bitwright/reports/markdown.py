"""The Markdown file of a report, and the Markdown tables of all reports."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from bitwright.core import formatting
from bitwright.core.errors import visible_text
from bitwright.core.files import write_text
from bitwright.reports.record import Record, environment_facts, executed_sites, ranges, row_facts
from bitwright.reports.sections import AdaptiveRecord


def write_markdown(record: Record, path: str | Path) -> Path:
    """Write the file atomically."""
    return write_text(Path(path), markdown(record))


def markdown(record: Record) -> str:
    """The figures of the page, without charts and histograms."""
    parts = [
        f"# {escaped(record.title)}",
        _line(record),
        *_warnings(record),
        *_measured(record),
        *_executed(record),
        *_sites(record),
        *_verbs(record),
        *_devices(record),
        "## Environment",
        table(["What", "Value"], environment_facts(record)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _line(record: Record) -> str:
    backend = "" if record.backend is None else f", backend {escaped(record.backend)}"
    return f"Workload {escaped(record.workload)}{backend}, {escaped(record.created)}."


def _warnings(record: Record) -> Iterable[str]:
    if record.warnings:
        yield "## Warnings"
        yield table(
            ["what", "where", "fix"],
            [(warning.what, warning.where or "", warning.fix or "") for warning in record.warnings],
        )


def _measured(record: Record) -> Iterable[str]:
    if record.accuracies:
        first = record.accuracies[0]
        rows = [(a.where, a.text, "" if a is first else a.change_from(first)) for a in record.accuracies]
        yield "## Accuracy"
        yield table(["run by", f"#{first.metric}", "#change"], rows)
    if record.sizes:
        yield "## Size"
        yield table(["form", "#size"], [(size.name, formatting.size(size.bytes)) for size in record.sizes])
    if record.timings:
        yield "## Latency"
        heads = ["runtime", "variant", "#batch", "#threads", "#median", "#p10", "#p90", "#of float"]
        times = [
            (
                t.runtime,
                t.variant,
                str(t.batch),
                str(t.threads),
                *_ms(t.median_ms, t.p10_ms, t.p90_ms),
                f"{t.ratio:.2f}×{t.doubt_text}",
            )
            for t in record.timings
        ]
        yield table(heads, times)
    if record.parities:
        yield "## Runtime against simulation"
        heads = ["runtime", "outputs", "#SQNR", "#largest error", "first diverging site"]
        checks = [
            (
                p.runtime,
                "agrees" if p.passed else "diverges",
                formatting.decibels(p.sqnr_db),
                f"{p.max_error:.3g}",
                p.first_divergence or "none",
            )
            for p in record.parities
        ]
        yield table(heads, checks)
    if record.distance is not None:
        far = record.distance
        yield "## Quantized against float"
        agreement = "" if far.top1_agreement is None else f"{100 * far.top1_agreement:.4g} %"
        verdict = "far from float" if far.far else "close to float"
        row = (verdict, formatting.decibels(far.sqnr_db), agreement, f"{far.samples:,}")
        yield table(["simulated model", "#SQNR", "#same top-1", "#samples"], [row])
        yield table(["site with a large error", "#SQNR"], [(s, formatting.decibels(db)) for s, db in far.worst.items()])
    if record.others:
        yield "## Other runs"
        others = [
            (
                o.title,
                o.created,
                "" if o.accuracy is None else o.accuracy.text,
                "" if o.size is None else formatting.size(o.size.bytes),
                "" if o.timing is None else f"{o.timing.ratio:.2f}×{o.timing.doubt_text}",
            )
            for o in record.others
        ]
        yield table(["run", "when", "#accuracy", "#size", "#of float's latency"], others)


def _executed(record: Record) -> Iterable[str]:
    if record.row is None:
        return
    yield "## What ran"
    heads = ["role", "quantizer", "effective format", "#sites", "#levels counted"]
    found = executed_sites(record.row)
    yield table(heads, [(role, o.quantizer, o.format, str(o.sites), str(o.levels)) for role, o in found])
    yield table(["what", "value"], row_facts(record.row))


def _sites(record: Record) -> Iterable[str]:
    if record.sensitivity is not None:
        yield "## Sensitivity"
        heads = ["site", "format", "#own SQNR", "#output error", "#loss change"]
        scores = [
            (
                s.site,
                s.format,
                formatting.decibels(s.sqnr_db),
                formatting.percent(s.output_error),
                "" if s.loss_change is None else f"{s.loss_change:+.3g}",
            )
            for s in record.sensitivity.sites
        ]
        yield table(heads, scores)
    if record.sites:
        yield "## Plan"
        heads = ["site", "format", "#SQNR", "#clipped", "#range", "why"]
        rows = [
            (
                s.site,
                s.format,
                "" if s.sqnr_db is None else f"{s.sqnr_db:.1f} dB",
                "" if s.clipped is None else formatting.percent(s.clipped),
                ranges(s)[0],
                s.why,
            )
            for s in record.sites
        ]
        yield table(heads, rows)
    if record.float_operators:
        yield "## Left in float"
        yield table(["operator", "kind", "why"], [(o.operator, o.kind, o.why) for o in record.float_operators])
    if record.folds:
        yield "## Folded"
        yield table(["batch norm", "into"], list(record.folds.items()))
    if record.steps:
        yield "## Steps"
        ran = [
            (s.step, str(s.units), f"{s.seconds:.1f} s", "; ".join(f"{k}: {v}" for k, v in s.skipped.items()))
            for s in record.steps
        ]
        yield table(["step", "#units", "#time", "skipped"], ran)


def _verbs(record: Record) -> Iterable[str]:
    if record.tuning is not None:
        found = record.tuning
        verdict = {True: "the goal holds", False: "the goal is missed", None: "no goal was checked"}[found.met_goal]
        yield f"## Tuning by {escaped(found.strategy)}"
        yield f"{escaped(found.goal)}: {verdict}. Ended: {escaped(found.stopped_because)}."
        yield from (f"- {escaped(note)}" for note in found.notes)
        heads = ["#trial", "passes", f"#{found.metric}", "#latency", "#size", "Pareto", "candidate"]
        rows = [
            (
                str(t.number),
                "yes" if t.passed else "no",
                f"{t.metrics[found.metric]:.4g}" if found.metric in t.metrics else "",
                "" if t.latency_ratio is None else f"{t.latency_ratio:.2f}×",
                "" if t.size is None else formatting.size(t.size),
                "yes" if t.pareto else "",
                t.failed or t.candidate,
            )
            for t in found.trials
        ]
        yield table(heads, rows)
    if record.training is not None:
        names = [name for name in (record.training.metrics or ({},))[0] if name != "n"]
        yield f"## Training: {escaped(record.training.precision)}"
        epochs = [
            (str(n), *(f"{epoch[name]:.4g}" if name in epoch else "" for name in names))
            for n, epoch in enumerate(record.training.metrics, 1)
        ]
        yield table(["#epoch", *(f"#{name}" for name in names)], epochs)
        if record.training.adaptive is not None:
            yield from _ranks(record.training.adaptive)
    if record.comparison is not None:
        yield "## Runtimes"
        ran = [(one.runtime, one.executed_text) for one in record.comparison.runtimes]
        yield table(["runtime", "ran as"], ran)
        heads = ["runtime", "variant", "#batch", "#latency", "#of float"]
        timings = [t for one in record.comparison.runtimes for t in one.timings]
        yield table(
            heads,
            [(t.runtime, t.variant, str(t.batch), *_ms(t.median_ms), f"{t.ratio:.2f}×{t.doubt_text}") for t in timings],
        )


def _ranks(found: AdaptiveRecord) -> Iterator[str]:
    """Idle shares and plan switches of an adaptive run."""
    yield "## Ranks over time"
    yield table(
        ["rank", "#waits"], [(name, f"{100 * idle:.0f} %") for name, idle in zip(found.ranks, found.idle, strict=True)]
    )
    rows = [
        (
            str(one.step),
            one.reason,
            ", ".join(map(str, one.batches)),
            *("" if ms is None else f"{ms:.4g} ms" for ms in (one.stayed_ms, one.predicted_ms, one.measured_ms)),
        )
        for one in found.switches
    ]
    yield table(["#step", "why", "batches", "#without the switch", "#predicted", "#measured"], rows)


def _devices(record: Record) -> Iterable[str]:
    for found in record.forecasts:
        yield f"## Training step: {escaped(found.name)}"
        yield f"{found.step_ms:.4g} ms, {found.samples_per_second:,.0f} samples per second, predicted."
        heads = ["device", "#count", "#own work", "#busy", "#collectives", "#waits"]
        rows = [
            (
                d.name,
                str(d.count),
                *_ms(d.computing_ms),
                *(f"{100 * s:.0f} %" for s in (d.busy, d.communicating, d.waiting)),
            )
            for d in found.devices
        ]
        yield table(heads, rows)
        if found.measured is not None:
            pairs = [found.measured.step, *found.measured.phases, *found.measured.groups]
            lines = [
                (
                    b.name,
                    f"{b.predicted_ms:.3f} ms",
                    f"{b.measured_ms:.3f} ms",
                    formatting.relative_error(b.predicted_ms, b.measured_ms),
                )
                for b in pairs
                if max(b.predicted_ms, b.measured_ms) > 0
            ]
            yield table([f"median of {found.measured.steps} steps", "#predicted", "#measured", "#error"], lines)


def _ms(*values: float) -> tuple[str, ...]:
    return tuple(f"{value:.3g} ms" for value in values)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, escape: bool = True) -> str:
    """A table. Heads that begin with # are columns of numbers. Cells are escaped unless they are Markdown already."""
    names = "| " + " | ".join(escaped(head.removeprefix("#")) for head in heads) + " |"
    rule = "|" + "|".join("---:" if head.startswith("#") else "---" for head in heads) + "|"
    cells = [map(escaped, row) if escape else row for row in rows]
    return "\n".join([names, rule, *("| " + " | ".join(row) + " |" for row in cells)])


def escaped(value: str) -> str:
    """Escape Markdown, HTML and column separators: names come from models of other people.

    HTML is escaped as HTML, because some renderers do not accept a backslash before `<`.
    """
    plain = html.escape(visible_text(" ".join(value.split())), quote=False)
    return re.sub(r"[\\`*\[\]|~$]|^(?:#+|[-+=]+)(?=\s|$)|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\\g<0>", plain)
