"""Pieces of a page. Every string that comes from outside goes through `escape` here: names come from others' models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

_LONG, _LINE = 60, 44  # rows, and pixels of one


def asset(name: str, package: str = "bitwright.report.page") -> str:
    """The text of a file that lies beside a package's modules."""
    return files(package).joinpath(name).read_text(encoding="utf-8")


def document(title: str, body: str, *, data: str, nav: Iterable[tuple[str, str]], scripts: Iterable[str] = ()) -> str:
    """A whole page; `data` is JSON that `scripts` read, `nav` the ids and names of its sections."""
    css = asset("page.css")
    js = "\n".join((asset("page.js"), *scripts))
    # In a script element only "<" could end it; as an escape it is the same JSON.
    safe = data.replace("<", "\\u003c")
    links = "".join(f'<a href="#{escape(anchor)}">{escape(name)}</a>' for anchor, name in nav)
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(title)} · Bitwright</title>\n<style>\n{css}</style>\n</head>\n<body>",
            '<a class="skip" href="#main">Skip to the content</a>',
            f'<div class="bar"><div><b class="mark">{_MARK}Bitwright</b><nav aria-label="Sections">{links}</nav>'
            f"{_THEME}</div></div>",
            f'<main id="main">\n{body}\n</main>',
            f'<script type="application/json" id="record">{safe}</script>',
            f"<script>\n{js}</script>\n</body>\n</html>\n",
        ]
    )


# Bars of falling height: the precision that is left.
_MARK = (
    '<svg class="logo" width="18" height="18" viewBox="0 0 18 18" aria-hidden="true">'
    '<rect x="1" y="2" width="3" height="14" rx="1"/><rect x="5.5" y="6" width="3" height="10" rx="1"/>'
    '<rect x="10" y="10" width="3" height="6" rx="1"/><rect x="14.5" y="13" width="3" height="3" rx="1"/></svg>'
)
_THEME = (
    '<button type="button" id="theme" hidden aria-label="Colours: as the system">'
    '<svg width="16" height="16" viewBox="0 0 16 16" aria-hidden="true"><circle cx="8" cy="8" r="6.5" fill="none" '
    'stroke="currentColor" stroke-width="1.5"/><path d="M8 1.5a6.5 6.5 0 0 1 0 13z" fill="currentColor"/></svg>'
    "<span>Auto</span></button>"
)


def section(anchor: str, title: str, body: str, *, note: str = "") -> str:
    """A part of the page with a heading; `body` is markup already, `note` is text."""
    below = f'<p class="note">{escape(note)}</p>' if note else ""
    head = f'<h2 id="{anchor}-h">{escape(title)}</h2>'
    return f'<section id="{anchor}" aria-labelledby="{anchor}-h">{head}{below}{body}</section>'


def card(title: str, value: str, *lines: str, tone: str = "") -> str:
    """One figure of the summary."""
    below = "".join(f"<span>{escape(line)}</span>" for line in lines)
    mood = f' class="{tone}"' if tone else ""
    return f'<div class="card"><h3>{escape(title)}</h3><strong{mood}>{escape(value)}</strong>{below}</div>'


def cards(found: Sequence[str]) -> str:
    """The summary: up to six in a row, more in two rows that are nearly equal."""
    columns = len(found) if len(found) <= 6 else -(-len(found) // 2)
    return f'<div class="cards" style="--n: {columns}">{"".join(found)}</div>' if found else ""


def cell(text: str, *, value: float | None = None, code: bool = False, tone: str = "") -> str:
    """A cell; one with a `value` is a number, by which it is sorted."""
    inner = f"<code>{escape(text)}</code>" if code else escape(text)
    kinds = " ".join(kind for kind in ("" if value is None else "n", tone) if kind)
    mark = f' class="{kinds}"' if kinds else ""
    sort = "" if value is None else f' data-v="{value!r}"'
    return f"<td{mark}{sort}>{inner}</td>"


def row(*cells: str) -> str:
    """A row of cells."""
    return f"<tr>{''.join(cells)}</tr>"


def table(
    heads: Iterable[str],
    rows: Iterable[str],
    *,
    label: str,
    sortable: bool = False,
    anchor: str = "",
    stacked: bool = False,
    ascending: str = "",
) -> str:
    """A table; heads that begin with a hash are columns of numbers. A wide one scrolls by itself, by keys, too.

    A `stacked` one shows each row as a small card on narrow screens. `ascending` is the head that rows are sorted by.
    """
    cells = []
    for head in heads:
        name, mark = escape(head.removeprefix("#")), ' class="n"' if head.startswith("#") else ""
        inner = f'<button type="button">{name}</button>' if sortable else name
        order = ' aria-sort="ascending"' if name == ascending else ""
        cells.append(f'<th scope="col"{mark}{order}>{inner}</th>')
    kinds = [*(["sortable"] if sortable else []), *(["stacked"] if stacked else [])]
    kind = f' class="{" ".join(kinds)}"' if kinds else ""
    named = f' id="{anchor}"' if anchor else ""
    lines = list(rows)
    # A long table is laid out when it comes into view; until then its height is guessed from its rows.
    long = (
        f'scroll long" style="contain-intrinsic-size: auto {_LINE * len(lines)}px' if len(lines) > _LONG else "scroll"
    )
    return (
        f'<div class="{long}" role="region" tabindex="0" aria-label="{escape(label)}"><table{kind}{named}>'
        f"<thead><tr>{''.join(cells)}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def choice(anchor: str, label: str, options: Iterable[tuple[str, str]]) -> str:
    """A list to choose from."""
    inner = "".join(f'<option value="{escape(value)}">{escape(text)}</option>' for value, text in options)
    return f'<label class="pick">{escape(label)}<select id="{anchor}">{inner}</select></label>'


def facts(items: Iterable[tuple[str, str]]) -> str:
    """Names and values."""
    inner = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in items)
    return f"<dl>{inner}</dl>"


def pair(*parts: str) -> str:
    """Parts beside each other, where there is room; empty ones are left out."""
    shown = [part for part in parts if part]
    return "" if not shown else shown[0] if len(shown) == 1 else f'<div class="pair">{"".join(shown)}</div>'
