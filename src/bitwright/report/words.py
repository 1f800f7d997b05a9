"""Numbers as people read them; the page and the command line say them alike."""

from __future__ import annotations

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
