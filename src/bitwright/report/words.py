"""Numbers as people read them; the page and the command line say them alike."""

from __future__ import annotations

from bitwright.report.ran import GridRow, Sites
from bitwright.report.record import Accuracy, Record, Size, Timing


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


def score(accuracy: Accuracy) -> str:
    """A metric; top-1 is in percent."""
    return f"{accuracy.value:.2f} %" if accuracy.metric.startswith("top") else f"{accuracy.value:.5g}"


def change(accuracy: Accuracy, reference: Accuracy) -> str:
    """The difference to the reference, in the metric's own unit."""
    difference = accuracy.value - reference.value
    return f"{difference:+.2f} points" if accuracy.metric.startswith("top") else f"{difference:+.3g}"


def speed(timing: Timing) -> str:
    """Relative to float in the same run."""
    return f"{timing.ratio:.2f}× the time of float"


def rate(timing: Timing) -> str:
    """Samples per second."""
    return f"{timing.batch / timing.median_ms * 1e3:,.0f} samples/s"


def decibels(value: float | None) -> str:
    """A ratio of signal and noise."""
    return "exact" if value is None else f"{value:.1f} dB"


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
    """A share, with a few digits."""
    return f"{100 * share:.3g} %"


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
