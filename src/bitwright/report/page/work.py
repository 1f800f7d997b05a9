"""What verbs beside `quantize` recorded: steps, devices, searches, training, runtimes; and the environment."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from bitwright.cluster import MemoryLimit
from bitwright.core import formatting
from bitwright.report.forecast import Both, Device, Forecast, Measured
from bitwright.report.formatting import environment_facts
from bitwright.report.page import charts
from bitwright.report.page.elements import cell, facts, row, section, table
from bitwright.report.record import Record


def steps(record: Record) -> str:
    """The algorithms that ran, in order, and what each of them left alone."""
    if not record.steps:
        return ""
    rows = [
        row(
            cell(one.step, code=True),
            cell(str(one.units), value=one.units),
            cell(f"{one.seconds:.1f} s", value=one.seconds),
            cell("; ".join(f"{site}: {why}" for site, why in one.skipped.items()) or "nothing"),
        )
        for one in record.steps
    ]
    return section("steps", "Steps", table(["Step", "#Units", "#Time", "Left alone"], rows, label="Steps"))


def suggestion(record: Record) -> str:
    """What keeping the worst operators in float would bring, as `bitwright score` measured it."""
    found = None if record.sensitivity is None else record.sensitivity.suggestion
    if found is None:
        return ""
    rows = [row(cell("none"), cell(f"{found.before:.2f}", value=found.before), cell("", value=0.0))]
    rows += [
        row(
            cell(f"+ {trial.operators[-1]}", code=True),
            cell(f"{trial.metric:.2f}", value=trial.metric),
            cell(f"{trial.metric - found.before:+.2f}", value=trial.metric - found.before),
        )
        for trial in found.trials
    ]
    note = (
        f"Suggested: keep {', '.join(found.operators)} in float."
        if found.operators
        else "Nothing is won by keeping operators in float."
    )
    heads = ["Operators in float", f"#{found.metric}", "#Gain"]
    return section("suggestion", "What float would bring", table(heads, rows, label="Suggestion"), note=note)


def devices(record: Record) -> str:
    """Each forecast with a timeline for each kind of device."""
    return "".join(_forecast(one, number) for number, one in enumerate(record.forecasts))


def _forecast(found: Forecast, number: int) -> str:
    note = (
        f"A step takes {found.step_ms:.4g} ms, {found.samples_per_second:,.0f} samples per second. "
        f"Critical path: {' → '.join(found.critical)}."
    )
    body = "".join(_timeline(found, device, first=index == 0) for index, device in enumerate(found.devices))
    if found.left_out:
        body += f'<p class="note">{found.left_out} more devices are not drawn.</p>'
    rows = [_device(device) for device in found.devices]
    heads = ["Device", "#Count", "#Own work", "#Busy", "#Collectives", "#Waits", "#Memory peak", "At"]
    heads += ["#Process", "#Limit", "Fits"]
    body += table(heads, rows, label="Devices")
    if found.measured is not None:
        body += f"<h3>Predicted against measured, median of {found.measured.steps} steps</h3>"
        body += table(["Part", "What", "#Predicted", "#Measured", "#Error"], _compared(found.measured), label="Errors")
        if found.measured.drift is not None:
            body += (
                f'<p class="note">The machine took {found.measured.drift:.2f} times as long for a fixed piece of work '
                "as when it was profiled.</p>"
            )
    return section(f"devices-{number}", f"Training step: {found.name}", body, note=note)


def _timeline(found: Forecast, device: Device, *, first: bool) -> str:
    """Predicted phases, operators and collectives above the measured phases, on one axis."""
    predicted = _phases(device)
    lanes: list[tuple[str, list[charts.Bar]]] = [("predicted", predicted)]
    compute = [s for s in device.spans if s.kind != "collective"]
    if compute:
        lanes.append(
            (
                "operators",
                [charts.Bar(start=s.start_ms, end=s.end_ms, name=s.name, kind=f"op {s.kind}") for s in compute],
            )
        )
    sent = [s for s in device.spans if s.kind == "collective"]
    if sent:
        lanes.append(
            ("collectives", [charts.Bar(start=s.start_ms, end=s.end_ms, name=s.name, kind="collective") for s in sent])
        )
    if found.measured is not None and first:
        lanes.append(("measured", _stacked(_in_order((b.name, b.measured_ms) for b in found.measured.phases))))
    end = max((bar.end for _, bars in lanes for bar in bars), default=0.0)
    if end <= 0:
        return ""
    title = device.name if device.count == 1 else f"{device.name} × {device.count}"
    drawing = charts.lanes(lanes, end=end, unit="ms", label=f"Timeline of {title}")
    return f"<h3>{escape(title)}</h3>{drawing}"


def _phases(device: Device) -> list[charts.Bar]:
    """The phases on the clock of the operators: waiting between backward and optimizer takes its time, too."""
    hull: dict[str, tuple[float, float]] = {}
    for span in device.spans:
        start, end = hull.get(span.kind, (span.start_ms, span.end_ms))
        hull[span.kind] = min(start, span.start_ms), max(end, span.end_ms)
    times = device.phases_ms
    if not {"forward", "backward", "tail"} <= set(hull):
        return _stacked(_in_order(times.items()))
    (begins, forward), (_, backward), (tail, end) = (hull[kind] for kind in ("forward", "backward", "tail"))
    loss = min(forward + times.get("loss", 0.0), backward)
    # Where a step accumulates, operators are those of its last batch.
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
        charts.Bar(start=start, end=stop, name=name, kind=f"phase {kind}")
        for kind, name, start, stop in marks
        if stop - start > least
    ]


def _in_order(items: Iterable[tuple[str, float]]) -> list[tuple[str, float]]:
    """What isn't one of a step's phases comes before them, as the prediction has it."""
    return sorted(items, key=lambda item: item[0] != "other")


def _stacked(items: Iterable[tuple[str, float]]) -> list[charts.Bar]:
    bars: list[charts.Bar] = []
    at = 0.0
    for name, length in items:
        if length > 0:
            bars.append(charts.Bar(start=at, end=at + length, name=name, kind=f"phase {name}"))
        at += length
    return bars


def _device(device: Device) -> str:
    needed = device.memory_peak if device.memory_process is None else device.memory_process
    limit = None
    if device.memory_limit is not None:
        limit = MemoryLimit(total=device.memory_limit, reserve=device.memory_reserve)
    fits = "" if needed is None or limit is None else limit.holds(needed)
    return row(
        cell(device.name),
        cell(str(device.count), value=device.count),
        cell(f"{device.computing_ms:.4g} ms", value=device.computing_ms),
        *(cell(f"{100 * share:.0f} %", value=share) for share in (device.busy, device.communicating, device.waiting)),
        cell("" if device.memory_peak is None else formatting.size(device.memory_peak), value=device.memory_peak or 0),
        cell(device.memory_cause or ""),
        cell("" if needed is None else formatting.size(needed), value=needed or 0),
        cell("" if limit is None else str(limit), value=0 if limit is None else limit.usable),
        cell({True: "yes", False: "no", "": ""}[fits], tone="bad" if fits is False else ""),
    )


def _compared(found: Measured) -> list[str]:
    """Rows for the step, its phases and its operators; what is less than a thousandth of the step is noise."""
    parts = [("step", found.step), *(("phase", one) for one in found.phases), *(("operators", o) for o in found.groups)]
    least = found.step.measured_ms / 1000
    return [_both(part, one) for part, one in parts if max(one.predicted_ms, one.measured_ms) > least]


def _both(part: str, both: Both) -> str:
    off = formatting.relative_error(both.predicted_ms, both.measured_ms)
    error = both.predicted_ms / both.measured_ms - 1 if both.measured_ms > 0 else 0.0
    return row(
        cell(part),
        cell("whole" if part == "step" else both.name),
        cell(f"{both.predicted_ms:.3f} ms", value=both.predicted_ms),
        cell(f"{both.measured_ms:.3f} ms", value=both.measured_ms),
        cell(off, value=error),
    )


def tuning(record: Record) -> str:
    """The search: its course as a chart, and every trial."""
    found = record.tuning
    if found is None or not found.trials:
        return ""
    known = [t for t in found.trials if found.metric in t.metrics]
    chart = ""
    if len(known) > 1:
        dots = [
            charts.Dot(
                x=trial.number,
                y=trial.metrics[found.metric],
                name=f"trial {trial.number}",
                words=f"{found.metric} {trial.metrics[found.metric]:.4g}, {trial.candidate}",
                kind=f"trial{' best' if trial.pareto else ''}{' chosen' if trial.best else ''}",
                label=trial.best,
            )
            for trial in known
        ]
        best = max(t.metrics[found.metric] for t in known)
        chart = charts.scatter(
            dots,
            x_name="trial",
            y_name=found.metric,
            label="The course of the search",
            limit=found.limit,
            limit_name="" if found.limit is None else f"goal: {found.limit:.4g}",
            least_y=1.0 if found.metric.startswith("top") else abs(best) / 100 or 1.0,
            counted=True,
        )
    rows = [
        row(
            cell(str(trial.number)),
            cell(
                "failed" if trial.failed else "passes" if trial.passed else "fails", tone="good" if trial.passed else ""
            ),
            cell(_metric(trial.metrics, found.metric, trial.stopped), value=trial.metrics.get(found.metric, -1.0)),
            cell(
                "–" if trial.latency_ratio is None else f"{trial.latency_ratio:.2f}×", value=trial.latency_ratio or 0.0
            ),
            cell("–" if trial.size is None else formatting.size(trial.size), value=trial.size or 0),
            cell("✓" if trial.pareto else ""),
            cell(f"{trial.seconds:.1f} s", value=trial.seconds),
            cell((trial.failed or trial.candidate) + (" (chosen)" if trial.best else "")),
        )
        for trial in found.trials
    ]
    heads = ["Trial", "Goal", f"#{found.metric}", "#Latency", "#Size", "Pareto", "#Took", "Candidate"]
    body = chart + table(heads, rows, label="Trials", sortable=True)
    if found.notes:
        body += "".join(f'<p class="note">{escape(note)}</p>' for note in found.notes)
    return section("tuning", f"Tuning by {found.strategy}", body, note=f"{found.goal}. Ended: {found.stopped_because}.")


def _metric(metrics: dict[str, float], name: str, stopped: bool) -> str:
    return "–" if name not in metrics else f"{'about ' if stopped else ''}{metrics[name]:.4g}"


def training(record: Record) -> str:
    """Metrics after each epoch."""
    found = record.training
    if found is None or not found.metrics:
        return ""
    names = [name for name in found.metrics[0] if name != "n"]
    values = [epoch.get(found.metric) for epoch in found.metrics]
    dots = [
        charts.Dot(
            x=number,
            y=value,
            name=f"epoch {number}",
            words=f"{found.metric} {value:.4g}",
            kind=f"trial{' best' if number == found.best_epoch else ''}",
        )
        for number, value in enumerate(values, 1)
        if value is not None
    ]
    chart = ""
    if len(dots) > 1:
        least = 1.0 if found.metric.startswith("top") else 0.0
        chart = charts.scatter(dots, x_name="epoch", y_name=found.metric, label="Training", least_y=least, counted=True)
    rows = [
        row(
            cell(str(number)),
            *(cell(f"{epoch[n]:.4g}" if n in epoch else "–", value=epoch.get(n, -1.0)) for n in names),
        )
        for number, epoch in enumerate(found.metrics, 1)
    ]
    processes = "1 process" if found.processes == 1 else f"{found.processes} processes"
    about = f"{found.precision}, {found.steps:,} steps, {processes}"
    body = chart + table(["Epoch", *(f"#{name}" for name in names)], rows, label="Epochs", sortable=True)
    items = [*found.settings.items(), ("began with", found.init or "the workload's own weights")]
    body += facts([*items, ("config hash", found.config_hash)])
    return section("training", "Training", body, note=about)


def runtimes(record: Record) -> str:
    """What `bitwright bench` measured on each runtime."""
    found = record.comparison
    if found is None or not found.runtimes:
        return ""
    rows = []
    for one in found.runtimes:
        scores = {accuracy.where: accuracy.text for accuracy in one.accuracies}
        sizes = {size.name: size.bytes for size in one.sizes}
        kinds = one.executed_text
        timings = {(t.batch, t.variant): t for t in one.timings}
        for batch, variant in sorted(timings) or [(0, "quantized")]:
            timing = timings.get((batch, variant))
            rows.append(
                row(
                    cell(one.runtime),
                    cell(variant),
                    cell(str(batch) if batch else "–", value=batch),
                    cell(
                        "–" if timing is None else f"{timing.median_ms:.3g} ms",
                        value=timing.median_ms if timing else 0.0,
                    ),
                    cell("–" if timing is None else f"{timing.ratio:.2f}×", value=timing.ratio if timing else 0.0),
                    cell(scores.get(variant, "–")),
                    cell(formatting.size(sizes[variant]) if variant in sizes else "–", value=sizes.get(variant, 0)),
                    cell(kinds if variant == "quantized" else "float"),
                    cell("✓" if one.parity.passed else "✗ diverges", tone="good" if one.parity.passed else "bad"),
                )
            )
    heads = ["Runtime", "Variant", "#Batch", "#Latency", "#Of float", "Accuracy", "#Size", "Ran as", "Agrees"]
    body = table(heads, rows, label="Runtimes", sortable=True)
    for pick in found.fastest:
        speed = f"{pick.median_ms:.3g} ms" if pick.throughput is None else f"{pick.throughput:,.0f} samples/s"
        body += f'<p class="note">Fastest with batch {pick.batch}: {escape(pick.runtime)}, {pick.variant}, {speed}.</p>'
    for skip in found.skipped:
        body += f'<p class="note">Skipped {escape(skip.runtime)}: {escape(skip.why)}</p>'
    return section("runtimes", "Runtimes", body, note="All measured in turns, in one process.")


def environment(record: Record) -> str:
    """Where it was measured."""
    return section("environment", "Environment", facts(environment_facts(record)))
