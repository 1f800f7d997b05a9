"""How results and progress are shown: the progress callback, tables as HTML, and charts as inline SVG.

Widths of charts are in percent, so that text has the same size on every screen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from math import ceil, floor, log10
from pathlib import Path
from typing import TypeAlias

from markupsafe import Markup, escape

from bitwright.core.files import write_text

__all__ = [
    "BAR_HEIGHT",
    "Bar",
    "Chart",
    "Dot",
    "Progress",
    "Summarized",
    "Table",
    "bar",
    "bar_chart",
    "lanes",
    "phases",
    "scatter",
    "svg",
    "ticks",
]

#: Called with the number of finished units, the total (None: unknown) and a description of the current unit.
#: Example: `lambda done, total, description: print(f"{done}/{total} {description}")`.
Progress: TypeAlias = Callable[[int, int | None, str], None]
_STOPS = 16  # points of a chart that the Tab key visits
BAR_HEIGHT = 31  # pixels: a line of text and its bar
_MOST = 50  # rows; `to_dict` and reports have all
_STYLE = (
    ".bitwright-chart text{fill:currentColor;font:12.5px system-ui,sans-serif}"
    ".bitwright-chart .soft{opacity:.7}.bitwright-chart .head{font-weight:600}"
    ".bitwright-chart .rail{fill:#8884}.bitwright-chart .float{fill:#a3aebf}.bitwright-chart .quantized{fill:#0f766e}"
    ".bitwright-chart .grid{stroke:#8884}.bitwright-chart .front{stroke:#0f766e}"
    ".bitwright-chart .limit{stroke:#b45309}.bitwright-chart text.limit{stroke:none;fill:#b45309}"
    ".bitwright-chart .dot{fill:none;stroke:#2f5fa8;stroke-width:2}.bitwright-chart .dot.best{fill:#2f5fa8}"
)


def phases(progress: Progress | None) -> Callable[[str], None]:
    """Report phases whose number isn't known in advance, by their descriptions.

    >>> begin = phases(lambda done, total, description: print(done, total, description))
    >>> begin("exporting")
    0 None exporting
    >>> begin("timing")
    1 None timing
    """
    numbers = count()

    def begin(description: str) -> None:
        if progress is not None:
            progress(next(numbers), None, description)

    return begin


@dataclass(frozen=True, kw_only=True)
class Dot:
    """A point of a scatter chart."""

    x: float
    y: float
    name: str
    text: str
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
) -> Markup:
    """Points over two axes. `front` is drawn as steps, `limit` as a horizontal line.

    A `counted` x axis has whole numbers, and does not begin at zero.
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
    # The Tab key visits each point, unless there are many; then the table has the same figures.
    stop = ' tabindex="0"' if len(dots) <= _STOPS else ""
    names: list[str] = []
    for dot in dots:
        label_text = escape(f"{dot.name}: {dot.text}")
        parts.append(
            f'<circle class="dot {dot.kind}" cx="{px(dot.x)}" cy="{py(dot.y)}" r="5.5"{stop} role="img" '
            f'aria-label="{label_text}" data-tip="{label_text}"/>'
        )
        if dot.label:
            names.append(_label(dot, px(dot.x), py(dot.y), (dot.x - x0) / ((x1 - x0) or 1.0)))
    # Names are drawn last, so that no point covers them.
    return svg([*parts, *names], height, label, kind="scatter")


def _label(dot: Dot, x: str, y: float, share: float) -> str:
    """The name of a point, on its left or right. `page.js` moves names that overlap."""
    side = 'text-anchor="end" dx="-10"' if share > 0.6 else 'dx="10"'
    return f'<text class="name" data-x="{x}" data-y="{y}" x="{x}" y="{y + 4}" {side}>{escape(dot.name)}</text>'


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A span of time in a lane."""

    start: float
    end: float
    name: str
    kind: str


def lanes(rows: Sequence[tuple[str, Sequence[Bar]]], *, end: float, unit: str, label: str) -> Markup:
    """Named lanes over one time axis; a bar that is wide enough shows its name."""
    parts: list[str] = []
    y = 0
    total = ticks(0.0, end, 6)
    for name, bars in rows:
        parts.append(f'<text class="soft" x="0" y="{y + 12}">{escape(name)}</text>')
        y += 18
        parts.append(f'<rect class="rail" x="0" y="{y}" width="100%" height="20" rx="3"/>')
        for bar in bars:
            start, width = 100 * bar.start / end, 100 * (bar.end - bar.start) / end
            label_text = escape(f"{bar.name}: {bar.end - bar.start:.3g} {unit}")
            parts.append(
                f'<rect class="span {escape(bar.kind)}" x="{start:.3f}%" y="{y}" width="{max(width, 0.05):.3f}%" '
                f'height="20" data-tip="{label_text}"><title>{label_text}</title></rect>'
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
    """Round numbers from at most `low` to at least `high`, at least `least` apart.

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
    """A range of at least `least`, so that noise does not fill the axis."""
    missing = max(0.0, least - (high - low)) / 2
    return low - missing, high + missing


def bar(y: int, name: str, value: str, share: float, kind: str) -> str:
    """A line with a name on the left and a value on the right, and the bar under it."""
    short = name if len(name) <= 44 else f"…{name[-43:]}"
    return (
        f'<text x="0" y="{y + 12}">{escape(short)}<title>{escape(name)}</title></text>'
        f'<text class="soft" x="100%" y="{y + 12}" text-anchor="end">{escape(value)}</text>'
        f'<rect class="rail" x="0" y="{y + 17}" width="100%" height="7" rx="3.5"/>'
        f'<rect class="{kind}" x="0" y="{y + 17}" width="{100 * max(share, 0.0):.2f}%" height="7" rx="3.5"/>'
    )


def svg(parts: list[str], height: int, label: str, *, kind: str = "bars") -> Markup:
    """A drawing with a label for screen readers."""
    inner = "".join(parts)
    return Markup(f'<svg class="{kind}" height="{height}" role="group" aria-label="{escape(label)}">{inner}</svg>')


@dataclass(frozen=True)
class Table:
    """Rows of a result. Heads that begin with # are columns of numbers; None is an empty cell."""

    heads: Sequence[str]
    rows: Sequence[Sequence[object]]
    title: str = ""
    most: int | None = None
    """The number of rows that are shown."""

    def shown(self, most: int | None = None) -> tuple[Sequence[Sequence[object]], int]:
        """The first rows, and the number of omitted rows."""
        limit = most or self.most or len(self.rows)
        return self.rows[:limit], max(0, len(self.rows) - limit)

    def to_html(self) -> Markup:
        """An HTML table. Values are escaped.

        >>> print(Table(["name"], [("<a>",)]).to_html())
        <table><thead><tr><th>name</th></tr></thead><tbody><tr><td>&lt;a&gt;</td></tr></tbody></table>
        """
        right = [Markup(' style="text-align:right"') if head.startswith("#") else Markup() for head in self.heads]
        heads = zip(right, self.heads, strict=True)
        head = Markup().join(Markup("<th{}>{}</th>").format(style, name.removeprefix("#")) for style, name in heads)
        rows, left = self.shown(min(self.most or _MOST, _MOST))
        body = Markup().join(
            Markup("<tr>{}</tr>").format(
                Markup().join(
                    Markup("<td{}>{}</td>").format(style, "" if value is None else value)
                    for style, value in zip(right, row, strict=True)
                )
            )
            for row in rows
        )
        note = Markup("<p>… and {} more rows</p>").format(left) if left else Markup()
        above = Markup("<p><b>{}</b></p>").format(self.title) if self.title else Markup()
        return above + Markup("<table><thead><tr>{}</tr></thead><tbody>{}</tbody></table>").format(head, body) + note


class Summarized:
    """A result that notebooks and the command line show in the same way: the tables and lines of `summary`."""

    def summary(self) -> Iterable[Table | str]:
        """Tables and lines of text, in the order in which they are shown."""
        raise NotImplementedError

    def failures(self) -> list[str]:
        """Why the result fails its check; empty if it passes. The command line then exits with 1."""
        return []

    def _repr_html_(self) -> str:
        parts = self.summary()
        return "".join(Markup("<p>{}</p>").format(part) if isinstance(part, str) else part.to_html() for part in parts)


@dataclass(frozen=True)
class Chart:
    """A chart that notebooks show; `save` writes it as an SVG file."""

    svg: str
    """An <svg> element."""

    def _repr_svg_(self) -> str:
        namespace = 'xmlns="http://www.w3.org/2000/svg" width="100%"'
        start = (
            str(self.svg)
            .replace("<svg class=", f"<svg {namespace} class=", 1)
            .replace('class="', 'class="bitwright-chart ', 1)
        )
        opening, _, rest = start.partition(">")
        return f"{opening}><style>{_STYLE}</style>{rest}"

    def _repr_html_(self) -> str:
        return f'<div style="max-width:46rem">{self._repr_svg_()}</div>'

    def __repr__(self) -> str:
        return f"<Chart of {len(self.svg)} characters>"

    def save(self, path: str | Path) -> Path:
        """Write an SVG file."""
        return write_text(Path(path), self._repr_svg_() + "\n")


def bar_chart(bars: Iterable[tuple[str, str, float]], *, label: str) -> Chart:
    """Bars with a name, a text and a value each; the largest value has the full width."""
    rows = list(bars)
    most = max((value for _, _, value in rows), default=0.0) or 1.0
    parts = [
        bar(BAR_HEIGHT * index, name, text, value / most, "quantized") for index, (name, text, value) in enumerate(rows)
    ]
    return Chart(svg(parts, BAR_HEIGHT * len(rows), label))
