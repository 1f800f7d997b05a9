"""Numbers and data as text, in the same form in reports and on the command line."""

from __future__ import annotations

import json
from math import inf, isfinite
from typing import Any

from bitwright.core.errors import UNSEEN


def size(count: int) -> str:
    """A number of bytes, with decimal units.

    >>> size(27301), size(950)
    ('27.3 kB', '950 B')
    """
    value, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.1f} {units[0]}" if units[0] != "B" else f"{count} B"


def counted(number: float, noun: str) -> str:
    """A number with its noun.

    >>> counted(1, "epoch"), counted(2000, "epoch"), counted(1.5, "minute")
    ('1 epoch', '2,000 epochs', '1.5 minutes')
    """
    shown = f"{number:,}" if isinstance(number, int) else f"{number:g}"
    return f"{shown} {noun}{'' if number == 1 else 's'}"


def metric_value(metric: str, value: float) -> str:
    """A metric: two decimals for percentages, five significant digits for others.

    >>> metric_value("top1", 91.2), metric_value("mae", 0.0046596)
    ('91.20', '0.0046596')
    """
    return f"{value:.2f}" if metric.startswith("top") else f"{value:.5g}"


def metric_change(metric: str, difference: float) -> str:
    """The difference between two values of a metric, with its sign.

    >>> metric_change("top1", 0.5), metric_change("mae", -0.0001)
    ('+0.50', '-0.0001')
    """
    return f"{difference:+.2f}" if metric.startswith("top") else f"{difference:+.3g}"


def decibels(value: float | None) -> str:
    """A signal-to-noise ratio; None and infinity mean no noise."""
    return "exact" if value is None or value == inf else f"{value:.1f} dB"


def number(value: float) -> str:
    """Three significant digits."""
    return f"{value:.3g}"


def span(low: str, high: str) -> str:
    """A range; one value if both ends are equal.

    >>> span("1", "2"), span("1", "1")
    ('1 … 2', '1')
    """
    return low if low == high else f"{low} … {high}"


def relative_error(predicted: float, measured: float) -> str:
    """The error of a prediction, relative to the measured value.

    >>> relative_error(95.0, 100.0)
    '-5.0 %'
    """
    return f"{100 * (predicted / measured - 1):+.1f} %" if measured > 0 else "–"


def percent(share: float) -> str:
    """A share as a percentage with three significant digits.

    >>> percent(0.125), percent(1.2e-4), percent(9.5e-7), percent(0)
    ('12.5 %', '0.012 %', '< 0.001 %', '0 %')
    """
    return "< 0.001 %" if 0 < share < 1e-5 else f"{100 * share:.3g} %"


def json_text(value: Any) -> str:
    """JSON with escaped control characters; infinity and NaN are null."""
    text = json.dumps(_finite(value), indent=1, ensure_ascii=False)
    return UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
