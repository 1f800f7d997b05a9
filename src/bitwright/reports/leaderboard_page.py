"""The HTML page of a leaderboard: what its template needs."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

from bitwright.bench.leaderboard import Leaderboard, Row, Spread, Summary, comparable, drop_reference
from bitwright.bench.machine import Machine
from bitwright.bench.rows import report_folder
from bitwright.core.files import write_text, yaml_text
from bitwright.core.formatting import counted
from bitwright.reports.html import Card, all_and, document, render

_KEYS = ("algorithm", "backend", "bits", "model")


def write_page(
    board: Leaderboard, path: str | Path, *, results: str = "leaderboard.json", reports: str | Path | None = None
) -> Path:
    """Write the page atomically, with links to existing reports of rows in the folder `reports`.

    `results` is the name of the leaderboard's file in the commands on the page.
    """
    found = {} if reports is None else links(board, Path(path), Path(reports))
    return write_text(Path(path), page(board, results=results, reports=found))


def links(board: Leaderboard, path: Path, reports: Path) -> dict[str, str]:
    """Relative addresses of the reports that exist, by row."""
    found = {}
    for one in board.rows:
        report = report_folder(reports, one.id) / "report.html"
        if report.is_file():
            found[one.id] = quote(Path(os.path.relpath(report.resolve(), path.resolve().parent)).as_posix())
    return found


def page(
    board: Leaderboard, *, results: str = "leaderboard.json", reports: Mapping[str, str] = MappingProxyType({})
) -> str:
    """The text of the page. `reports` are addresses of reports by row."""
    title = board.title or board.name
    body = render(
        "leaderboard",
        board=board,
        title=title,
        reports=reports,
        reference=drop_reference(board),
        summary=_cards(board),
        filters=_filters(board),
        cells=_cells(board),
        machines=[(name, _machine_facts(machine)) for name, machine in board.machines.items()],
    )
    nav = [("overview", "Overview"), ("results", "Results"), ("about", "About")]
    rows = [_data(row, reports.get(row.id)) for row in board.rows]
    data = json.dumps({"results": results, "rows": rows}, ensure_ascii=False, separators=(",", ":"))
    return document(title, body, data=data, nav=nav, scripts=["leaderboard.js"])


def _cards(board: Leaderboard) -> list[Card]:
    states = Counter(row.status for row in board.rows)
    left = ", ".join(f"{count} {state}" for state, count in states.most_common() if state != "done")
    found = [Card(title="Rows done", value=f"{states['done']} of {len(board.rows)}", lines=[left or "nothing is left"])]
    found += [_width_card(board, bits) for bits in sorted({row.bits for row in board.rows}, reverse=True)]
    gaps = [(row.device.gap, row) for row in board.rows if row.device is not None and row.device.gap is not None]
    if gaps:
        gap, row = max(gaps, key=lambda pair: abs(pair[0]))
        lines = [f"{row.algorithm}, {row.backend}, {row.bits} bits", f"of {counted(len(gaps), 'row')} on a runtime"]
        found.append(Card(title="Largest hardware gap", value=f"{gap:+.2f} points", lines=lines))
    return found


def _width_card(board: Leaderboard, bits: int) -> Card:
    """The mean drop at a width, and the best and worst algorithm."""
    drops: dict[str, list[float]] = {}
    for one in comparable(board.rows):
        if one.bits == bits and one.drop is not None:
            drops.setdefault(one.algorithm, []).append(one.drop)
    title = f"Mean drop at {bits} bits"
    if not drops:
        return Card(title=title, value="–", lines=["no row is done"])
    means = sorted((mean(values), name) for name, values in drops.items())
    whole = [value for values in drops.values() for value in values]
    ends = [f"{name} {value:.1f}" for value, name in (means[0], means[-1])]
    lines = [" … ".join(dict.fromkeys(ends)), "over backends and models that all algorithms have"]
    return Card(title=title, value=f"{mean(whole):.1f} points", lines=lines)


def _filters(board: Leaderboard) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Id, label and options of each filter."""
    names = {"algorithm": "Algorithm", "backend": "Backend", "bits": "Bits", "model": "Model", "status": "State"}
    return [(f"by-{key}", name, all_and(getattr(row, key) for row in board.rows)) for key, name in names.items()]


@dataclass(frozen=True, kw_only=True)
class _Cell:
    """One line of the table of results: algorithm, backend, bits and model, over all seeds."""

    summary: Summary
    rows: list[Row]

    @property
    def ids(self) -> str:
        return " ".join(row.id for row in self.rows)

    @property
    def beyond(self) -> bool:
        return any(row.beyond for row in self.rows)

    @property
    def seeds(self) -> int:
        return sum(self.summary.rows.values())

    @property
    def states(self) -> str:
        counts = self.summary.rows
        return ", ".join(f"{count} {state}" if len(counts) > 1 else state for state, count in counts.items())

    @property
    def bad(self) -> bool:
        return not set(self.summary.rows) <= {"done", "pending"}

    @property
    def spreads(self) -> list[tuple[str, float]]:
        """Text and value of accuracy, drop and gap; a missing value sorts as the worst."""
        one = self.summary
        return [
            _spread(one.accuracy, " %", worst=-1.0),
            _spread(one.drop, "", worst=1e9),
            _spread(one.gap, "", worst=1e9, sign=True),
        ]


def _cells(board: Leaderboard) -> list[_Cell]:
    """One line for each algorithm, backend, width and model; the smallest drop comes first."""
    by_cell: dict[tuple[Any, ...], list[Row]] = {}
    for one in board.rows:
        by_cell.setdefault(tuple(getattr(one, key) for key in _KEYS), []).append(one)
    found = [s for s in board.summaries if all(getattr(s, key) is not None for key in _KEYS)]
    found.sort(key=lambda one: one.drop.mean if one.drop is not None else 1e9)
    return [_Cell(summary=one, rows=by_cell.get(tuple(getattr(one, key) for key in _KEYS), [])) for one in found]


def _spread(found: Spread | None, unit: str, *, worst: float, sign: bool = False) -> tuple[str, float]:
    if found is None:
        return "–", worst
    rounded = round(found.mean, 2) or 0.0  # no minus zero
    mean = f"{rounded:+.2f}" if sign else f"{rounded:.2f}"
    deviation = f" ± {found.std:.2f}" if found.count > 1 else ""
    return f"{mean}{deviation}{unit}", found.mean


def _machine_facts(machine: Machine) -> list[tuple[str, str]]:
    return [
        ("Machine", f"{machine.cpu}, {counted(machine.cores, 'core')}, {machine.platform}"),
        ("Instructions", " and ".join(dict.fromkeys(machine.instructions))),
        ("Bitwright", machine.bitwright + (f", revision {machine.revision}" if machine.revision else "")),
        ("CPU features", ", ".join(machine.cpu_features) or "none known"),
        ("Threads of torch", str(machine.threads)),
        ("Python", machine.python),
        ("Packages", ", ".join(f"{package} {version}" for package, version in machine.packages.items())),
    ]


def _data(row: Row, report: str | None) -> dict[str, Any]:
    """What the script shows of a row, with its config as YAML."""
    found = row.model_dump(mode="json", exclude={"config", "start"}, exclude_none=True)
    return {**found, "drop": row.drop, "yaml": yaml_text(row.config), **({"report": report} if report else {})}
