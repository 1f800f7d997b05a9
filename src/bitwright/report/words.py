"""Numbers as people read them; the page and the command line say them alike."""

from __future__ import annotations

from bitwright.report.comparison import OnRuntime
from bitwright.report.record import Record
from bitwright.report.record_parts import Accuracy, GridRow, SiteRow, Sites, Size, Timing

_NAMED = 6  # more names make a line unreadable; the JSON has all


def size(count: int) -> str:
    """Bytes, in thousands.

    >>> size(27301), size(950)
    ('27.3 kB', '950 B')
    """
    value, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.1f} {units[0]}" if units[0] != "B" else f"{count} B"


def counted(number: int, word: str) -> str:
    """So many of them.

    >>> counted(1, "epoch"), counted(2, "epoch")
    ('1 epoch', '2 epochs')
    """
    return f"{number} {word}{'' if number == 1 else 's'}"


def measured(metric: str, value: float) -> str:
    """A metric's value: hundredths of a percent, or digits that count, whatever the magnitude.

    >>> measured("top1", 91.2), measured("mae", 0.0046596)
    ('91.20', '0.0046596')
    """
    return f"{value:.2f}" if metric.startswith("top") else f"{value:.5g}"


def moved(metric: str, difference: float) -> str:
    """How much a metric changes.

    >>> moved("top1", 0.5), moved("mae", -0.0001)
    ('+0.50', '-0.0001')
    """
    return f"{difference:+.2f}" if metric.startswith("top") else f"{difference:+.3g}"


def score(accuracy: Accuracy) -> str:
    """A metric; top-1 is in percent."""
    return measured(accuracy.metric, accuracy.value) + (" %" if accuracy.metric.startswith("top") else "")


def change(accuracy: Accuracy, reference: Accuracy) -> str:
    """The difference to the reference, in the metric's own unit; where less is better, which of the two it is."""
    difference = accuracy.value - reference.value
    if accuracy.lower_is_better and difference:
        return f"{moved(accuracy.metric, difference)}, {'better' if difference < 0 else 'worse'}"
    return moved(accuracy.metric, difference) + (" points" if accuracy.metric.startswith("top") else "")


def speed(timing: Timing) -> str:
    """Relative to float in the same run."""
    return f"{timing.ratio:.2f}× the time of float"


def rate(timing: Timing) -> str:
    """Samples per second."""
    return f"{timing.batch / timing.median_ms * 1e3:,.0f} samples/s"


def decibels(value: float | None) -> str:
    """A ratio of signal and noise."""
    return "exact" if value is None else f"{value:.1f} dB"


def own_accuracy(record: Record) -> Accuracy:
    """Of the quantized model on the backend's own runtime, else on the first that was checked, else the last known."""
    names = [record.backend, *(one.runtime for one in record.parities), *(one.runtime for one in record.timings)]
    found = {one.where: one for one in record.accuracies[1:]}
    return next((found[name] for name in names if name in found), record.accuracies[-1])


def own_timings(record: Record) -> tuple[Timing, ...]:
    """Of the run itself, else of the backend's own runtime, or the first, as `bitwright bench` measured it."""
    if record.timings or record.comparison is None:
        return record.timings
    rows = [row for row in record.comparison.runtimes if row.timings]
    own = [row for row in rows if record.backend in (row.backend, row.runtime)]
    return next((row.timings for row in (*own, *rows)), ())


def seen(site: SiteRow) -> tuple[float, float] | None:
    """The least and greatest number that reached a site, as far as it was looked at."""
    return None if site.seen_low is None or site.seen_high is None else (site.seen_low, site.seen_high)


def ranges(site: SiteRow) -> tuple[str, str]:
    """What was seen at a site, and its grid. An accumulator's 32 bits reach far beyond any number: they say nothing."""
    wide = site.format.startswith("int32")
    grid = "" if wide else span(number(site.low), number(site.high))
    found = seen(site)
    return ("–" if wide else grid, "") if found is None else (span(*map(number, found)), grid)


def float_and_quantized(record: Record) -> tuple[Size, Size] | None:
    """The two sizes to compare: the first is the reference."""
    return (record.sizes[0], record.sizes[-1]) if len(record.sizes) > 1 else None


def number(value: float) -> str:
    """A few digits, whatever the magnitude."""
    return f"{value:.3g}"


def span(low: str, high: str) -> str:
    """One value, or the first and last of several."""
    return low if low == high else f"{low} … {high}"


def error(predicted: float, measured: float) -> str:
    """How far a prediction is off.

    >>> error(95.0, 100.0)
    '-5.0 %'
    """
    return f"{100 * (predicted / measured - 1):+.1f} %" if measured > 0 else "–"


def percent(share: float) -> str:
    """A share, with a few digits.

    >>> percent(0.125), percent(1.2e-4), percent(9.5e-7), percent(0)
    ('12.5 %', '0.012 %', '< 0.001 %', '0 %')
    """
    return "< 0.001 %" if 0 < share < 1e-5 else f"{100 * share:.3g} %"


def environment(record: Record) -> list[tuple[str, str]]:
    """Where it was measured: names and values."""
    found = record.environment
    items = [
        ("Machine", f"{found.cpu}, {found.cores} cores, {found.platform}"),
        ("CPU features", ", ".join(found.cpu_features) or "none known"),
        ("Threads of torch", str(found.threads)),
        ("Python", found.python),
        ("Packages", ", ".join(f"{name} {version}" for name, version in found.packages.items())),
        ("Seed", "none" if record.seed is None else str(record.seed)),
    ]
    return items if record.plan_sha256 is None else [*items, ("Plan (SHA-256)", record.plan_sha256)]


def ran_as(row: OnRuntime) -> str:
    """In which types a runtime multiplied, and what it left in float; what it doesn't tell is said."""
    if row.executed is None:
        return f"{row.runtime} doesn't tell"
    kinds = ", ".join(f"{count} {kind}" for kind, count in row.executed.items() if count) or "no products"
    if not row.executed.get("float"):
        return kinds
    if row.left_in_float is None:
        return f"{kinds} ({row.runtime} doesn't name them)"
    names, more = row.left_in_float[:_NAMED], len(row.left_in_float) - _NAMED
    return f"{kinds} ({', '.join(names)}{f' and {more} more' if more > 0 else ''})"


def executed(row: GridRow) -> list[tuple[str, Sites]]:
    """What ran at weights, then at activations."""
    both = {"weights": row.executed.weights, "activations": row.executed.activations}
    return [(role, one) for role, found in both.items() for one in found]


def ran(row: GridRow) -> list[tuple[str, str]]:
    """How a row of a grid was run, beside its quantizers."""
    folded = ", ".join(f"{count} by strategy {strategy}" for strategy, count in row.executed.folding.items())
    items = [
        ("Row", row.id),
        ("Float weights", row.start),
        ("Norms", f"folded: {folded}" if folded else "run as they are"),
        ("Biases on the accumulator's grid", str(row.executed.biases)),
    ]
    device = row.device
    if device is not None:
        kinds = ", ".join(f"{count} {kind}" for kind, count in (device.kinds or {}).items() if count)
        told = [] if device.gap is None else [f"{device.gap:+.2f} points from simulated"]
        told += [f"ran {kinds}"] if kinds else []
        items.append((f"On {device.runtime}", device.reason or "; ".join(told)))
    if row.beyond is not None:
        items.append(("Beyond the backend", row.beyond))
    return [*items, *(("Note", note) for note in row.notes)]
