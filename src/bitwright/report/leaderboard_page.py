"""`write_page`: a leaderboard as one page: filters, means and deviations, and what was really run for each row."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from html import escape
from pathlib import Path
from statistics import mean
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

from bitwright.bench.leaderboard import Leaderboard, Row, Spread, Summary, comparable, drop_words
from bitwright.bench.rows import report_folder
from bitwright.core.files import write_text, yaml_text
from bitwright.core.formatting import counted
from bitwright.report.page.elements import asset, card, cards, cell, choice, document, facts, row, section, table

_KEYS = ("algorithm", "backend", "bits", "model")
_HEADS = ("Algorithm", "Backend", "#Bits", "Model", "#Accuracy", "#Drop", "#Gap on the runtime", "#Seeds", "State")


def write_page(
    board: Leaderboard, path: str | Path, *, results: str = "leaderboard.json", reports: str | Path | None = None
) -> Path:
    """Write the page, whole or not at all. It links to the rows' reports in the folder `reports`, where there are any.

    `results` is the leaderboard's file, as commands on the page name it.
    """
    found = {} if reports is None else links(board, Path(path), Path(reports))
    return write_text(Path(path), page(board, results=results, reports=found))


def links(board: Leaderboard, path: Path, reports: Path) -> dict[str, str]:
    """Row → its report as the page sees it; only reports that are there."""
    found = {}
    for one in board.rows:
        report = report_folder(reports, one.id) / "report.html"
        if report.is_file():
            found[one.id] = quote(Path(os.path.relpath(report.resolve(), path.resolve().parent)).as_posix())
    return found


def page(
    board: Leaderboard, *, results: str = "leaderboard.json", reports: Mapping[str, str] = MappingProxyType({})
) -> str:
    """The page's text; every string of the leaderboard is escaped. `reports` are addresses by row."""
    title = board.title or board.name
    results_ = _cells(board, reports=bool(reports))
    body = "\n".join([_header(board, title), _cards(board), _filters(board), _matrix(board), results_, _about(board)])
    nav = [("overview", "Overview"), ("results", "Results"), ("about", "About")]
    rows = [_data(row, reports.get(row.id)) for row in board.rows]
    data = json.dumps({"results": results, "rows": rows}, ensure_ascii=False, separators=(",", ":"))
    scripts = [asset("leaderboard.js")]
    return document(title, body, data=data, nav=nav, scripts=scripts)


def _header(board: Leaderboard, title: str) -> str:
    return (
        f"<header><h1>{escape(title)}</h1><p>grid <b>{escape(board.name)}</b> · "
        f"{counted(len(board.rows), 'row')} · config <code>{escape(board.config_hash)}</code></p></header>"
    )


def _cards(board: Leaderboard) -> str:
    states = Counter(row.status for row in board.rows)
    left = [f"{count} {state}" for state, count in states.most_common() if state != "done"]
    found = [card("Rows done", f"{states['done']} of {len(board.rows)}", ", ".join(left) or "nothing is left")]
    found += [_width(board, bits) for bits in sorted({row.bits for row in board.rows}, reverse=True)]
    gaps = [row for row in board.rows if row.device is not None and row.device.gap is not None]
    if gaps:
        worst = max(gaps, key=_gap)
        found.append(
            card(
                "Largest hardware gap",
                f"{worst.device.gap if worst.device else 0:+.2f} points",
                f"{worst.algorithm}, {worst.backend}, {worst.bits} bits",
                f"of {counted(len(gaps), 'row')} on a runtime",
            )
        )
    return cards(found)


def _gap(row: Row) -> float:
    return abs(row.device.gap) if row.device is not None and row.device.gap is not None else 0.0


def _width(board: Leaderboard, bits: int) -> str:
    """What a width costs, and how far algorithms lie apart."""
    drops: dict[str, list[float]] = {}
    for one in comparable(board.rows):
        if one.bits == bits and one.drop is not None:
            drops.setdefault(one.algorithm, []).append(one.drop)
    if not drops:
        return card(f"Mean drop at {bits} bits", "–", "no row is done")
    means = sorted((mean(values), name) for name, values in drops.items())
    whole = [value for values in drops.values() for value in values]
    ends = [f"{name} {value:.1f}" for value, name in (means[0], means[-1])]
    note = "over backends and models that all algorithms have"
    return card(f"Mean drop at {bits} bits", f"{mean(whole):.1f} points", " … ".join(dict.fromkeys(ends)), note)


def _filters(board: Leaderboard) -> str:
    picks = []
    for key, name in zip(_KEYS, ("Algorithm", "Backend", "Bits", "Model"), strict=True):
        values = sorted({getattr(row, key) for row in board.rows})
        picks.append(choice(f"by-{key}", name, [("", "all"), *((str(v), str(v)) for v in values)]))
    states = sorted({row.status for row in board.rows})
    picks.append(choice("by-status", "State", [("", "all"), *((state, state) for state in states)]))
    return (
        f'<section id="filters" class="filters" aria-label="Filters"><div class="tools">{"".join(picks)}'
        '<button type="button" class="plain" id="clear">Clear</button>'
        '<span class="note" id="shown" role="status"></span></div></section>'
    )


def _matrix(board: Leaderboard) -> str:
    note = (
        f"Points below {drop_words(board)}: mean ± deviation over the rows that the filters leave; “all” is over those "
        "that every algorithm has. Drops can be compared over models, accuracies can't. Warmer is worse. Choose a cell "
        "to filter by it."
    )
    empty = '<noscript><p class="note">The overview needs scripts; the table below is whole.</p></noscript>'
    body = f'<p class="legend" id="legend" aria-hidden="true"></p><div id="matrix"></div>{empty}'
    return section("overview", "Drop by algorithm and backend", body, note=note)


def _cells(board: Leaderboard, *, reports: bool) -> str:
    """One line for each (algorithm, backend, bits, model), over seeds; those that lose least come first."""
    cells = [s for s in board.summaries if all(getattr(s, key) is not None for key in _KEYS)]
    by_cell: dict[tuple[Any, ...], list[Row]] = {}
    for one in board.rows:
        by_cell.setdefault(tuple(getattr(one, key) for key in _KEYS), []).append(one)
    cells.sort(key=lambda one: one.drop.mean if one.drop is not None else 1e9)
    lines = [_line(one, by_cell.get(tuple(getattr(one, key) for key in _KEYS), [])) for one in cells]
    told = "its report, its config" if reports else "its config"
    note = f"Mean ± deviation over seeds. Open a line for each seed: {told}, and what was really executed."
    tools = '<div class="tools only-narrow"><label class="pick">Sort<select id="sort-by"></select></label></div>'
    found = table(_HEADS, lines, label="Results", sortable=True, anchor="board", stacked=True, ascending="Drop")
    more = '<button type="button" class="plain" id="more" hidden></button>'
    return section("results", "Results", tools + found + more, note=note)


def _line(one: Summary, rows: list[Row]) -> str:
    states = ", ".join(f"{count} {state}" if len(one.rows) > 1 else state for state, count in one.rows.items())
    bad = not set(one.rows) <= {"done", "pending"}
    beyond = any(row.beyond for row in rows)
    marks = " ".join(f'data-{key}="{escape(str(getattr(one, key)))}"' for key in _KEYS)
    opener = (
        '<button type="button" class="opener" aria-expanded="false">'
        f"<code>{escape(one.algorithm or '')}</code></button>"
    )
    extra = '<small title="The backend can\'t run this width: its scheme is simulated.">beyond it</small>'
    cells = [
        f"<td>{opener}</td>",
        f"<td>{escape(one.backend or '')}{extra if beyond else ''}</td>",
        cell(str(one.bits), value=one.bits),
        cell(one.model or ""),
        _spread(one.accuracy, " %", worst=-1.0),
        _spread(one.drop, "", worst=1e9),
        _spread(one.gap, "", worst=1e9, sign=True),
        cell(str(sum(one.rows.values())), value=sum(one.rows.values())),
        cell(states, tone="bad" if bad else ""),
    ]
    ids = " ".join(row.id for row in rows)
    return f'<tr {marks} data-status="{escape(" ".join(one.rows))}" data-ids="{escape(ids)}">{"".join(cells)}</tr>'


def _spread(found: Spread | None, unit: str, *, worst: float, sign: bool = False) -> str:
    if found is None:
        return cell("–", value=worst)
    rounded = round(found.mean, 2) or 0.0  # no minus zero
    mean = f"{rounded:+.2f}" if sign else f"{rounded:.2f}"
    deviation = f" ± {found.std:.2f}" if found.count > 1 else ""
    return cell(f"{mean}{deviation}{unit}", value=found.mean)


def _about(board: Leaderboard) -> str:
    machines = "".join(
        f"<h3>{escape(name)}</h3>"
        + facts(
            [
                ("Machine", f"{found.cpu}, {counted(found.cores, 'core')}, {found.platform}"),
                ("Instructions", " and ".join(dict.fromkeys(found.instructions))),
                ("Bitwright", found.bitwright + (f", revision {found.revision}" if found.revision else "")),
                ("CPU features", ", ".join(found.cpu_features) or "none known"),
                ("Threads of torch", str(found.threads)),
                ("Python", found.python),
                ("Packages", ", ".join(f"{package} {version}" for package, version in found.packages.items())),
            ]
        )
        for name, found in board.machines.items()
    )
    floats = ""
    if board.floats:
        lines = [
            row(
                cell(one.model),
                cell(str(one.seed), value=one.seed),
                cell(f"{one.accuracy:.2f} %", value=one.accuracy),
                cell("–" if one.trained_on is None else f"{one.trained_on:.2f} %", value=one.trained_on or 0.0),
                cell(one.start, code=True),
            )
            for one in board.floats
        ]
        heads = ["Float network", "#Seed", "#Accuracy", "#Trained on as a row", "Weights"]
        floats = table(heads, lines, label="Float networks", sortable=True)
    grid = f"<details><summary>The whole grid, as YAML</summary><pre>{escape(yaml_text(board.config))}</pre></details>"
    return section("about", "What was run, and where", floats + grid + machines)


def _data(row: Row, report: str | None) -> dict[str, Any]:
    """What the script shows of a row; the config as the YAML that runs it again."""
    found = row.model_dump(mode="json", exclude={"config", "start"}, exclude_none=True)
    return {**found, "drop": row.drop, "yaml": yaml_text(row.config), **({"report": report} if report else {})}
