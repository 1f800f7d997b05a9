"""Bars as inline SVG; lengths are in percent, so that text keeps its size whatever the width."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from itertools import groupby

from bitwright.report.record import SiteRow, Timing

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
    return _svg(parts, y - 12, "Latency")


def worst_sites(rows: Iterable[SiteRow]) -> str:
    """The sites with the lowest SQNR."""
    known = sorted((row.sqnr_db, row.site) for row in rows if row.sqnr_db is not None and row.share is None)
    shown = known[:_MOST]
    longest = max((sqnr for sqnr, _ in shown), default=1.0)
    parts = [
        _bar(_ROW * index, site, f"{sqnr:.1f} dB", sqnr / longest if longest > 0 else 0.0, "quantized")
        for index, (sqnr, site) in enumerate(shown)
    ]
    return _svg(parts, _ROW * len(shown), "SQNR of sites")


def _bar(y: int, name: str, value: str, share: float, kind: str) -> str:
    """Name on the left and value on the right of a line, the bar under it."""
    short = name if len(name) <= 44 else f"…{name[-43:]}"
    return (
        f'<text x="0" y="{y + 12}">{escape(short)}<title>{escape(name)}</title></text>'
        f'<text class="soft" x="100%" y="{y + 12}" text-anchor="end">{escape(value)}</text>'
        f'<rect class="rail" x="0" y="{y + 17}" width="100%" height="7" rx="3.5"/>'
        f'<rect class="{kind}" x="0" y="{y + 17}" width="{100 * max(share, 0.0):.2f}%" height="7" rx="3.5"/>'
    )


def _svg(parts: list[str], height: int, label: str) -> str:
    return f'<svg height="{height}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
