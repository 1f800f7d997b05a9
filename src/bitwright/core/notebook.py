"""Results in notebooks: tables and charts as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from markupsafe import Markup

from bitwright.core import charts
from bitwright.core.files import write_text

_MOST = 50  # rows; `to_dict` and reports have all
_STYLE = (
    ".bitwright-chart text{fill:currentColor;font:12.5px system-ui,sans-serif}"
    ".bitwright-chart .soft{opacity:.7}.bitwright-chart .head{font-weight:600}"
    ".bitwright-chart .rail{fill:#8884}.bitwright-chart .float{fill:#a3aebf}.bitwright-chart .quantized{fill:#0f766e}"
    ".bitwright-chart .grid{stroke:#8884}.bitwright-chart .front{stroke:#0f766e}"
    ".bitwright-chart .limit{stroke:#b45309}.bitwright-chart text.limit{stroke:none;fill:#b45309}"
    ".bitwright-chart .dot{fill:none;stroke:#2f5fa8;stroke-width:2}.bitwright-chart .dot.best{fill:#2f5fa8}"
)


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], *, title: str = "") -> str:
    """An HTML table. Heads that begin with # are columns of numbers. Values are escaped; None is an empty cell.

    >>> table(["name"], [("<a>",)])
    '<table><thead><tr><th>name</th></tr></thead><tbody><tr><td>&lt;a&gt;</td></tr></tbody></table>'
    """
    right = [Markup(' style="text-align:right"') if head.startswith("#") else Markup() for head in heads]
    head = Markup().join(
        Markup("<th{}>{}</th>").format(style, name.removeprefix("#")) for style, name in zip(right, heads, strict=True)
    )
    left = iter(rows)
    body = Markup().join(
        Markup("<tr>{}</tr>").format(
            Markup().join(
                Markup("<td{}>{}</td>").format(style, "" if value is None else value)
                for style, value in zip(right, row, strict=True)
            )
        )
        for row in islice(left, _MOST)
    )
    more = sum(1 for _ in left)
    note = Markup("<p>… and {} more rows</p>").format(more) if more else Markup()
    above = Markup("<p><b>{}</b></p>").format(title) if title else Markup()
    made = Markup("<table><thead><tr>{}</tr></thead><tbody>{}</tbody></table>").format(head, body)
    return str(above + made + note)


@dataclass(frozen=True)
class Chart:
    """A chart that notebooks show; `save` writes it as an SVG file."""

    svg: str
    """An <svg> element of `core.charts`."""

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
        charts.bar(charts.BAR_HEIGHT * index, name, text, value / most, "quantized")
        for index, (name, text, value) in enumerate(rows)
    ]
    return Chart(charts.svg(parts, charts.BAR_HEIGHT * len(rows), label))
