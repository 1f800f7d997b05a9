"""A leaderboard as an HTML page and as Markdown."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

from bitwright.bench.grid_row import report_folder
from bitwright.bench.leaderboard import (
    Leaderboard,
    Row,
    Spread,
    Summary,
    comparable,
    drop_reference,
    reasons,
    short_reason,
    spread,
    spread_text,
    summary,
)
from bitwright.core.environment import Machine
from bitwright.core.errors import BitwrightError
from bitwright.core.files import write_text, yaml_text
from bitwright.core.formatting import counted
from bitwright.core.output_folder import replacing_with_siblings
from bitwright.reports.markdown import escaped, table
from bitwright.reports.page import Card, all_and, document, render

_KEYS = ("algorithm", "backend", "bits", "model")


def write_leaderboard(board: Leaderboard, path: str | Path) -> Path:
    """Write a leaderboard as JSON, and as Markdown next to it; both or none."""
    path = check_leaderboard_path(path)
    with replacing_with_siblings(path) as temporary:
        board.save(temporary)
        write_text(temporary.with_suffix(".md"), leaderboard_markdown(board))
    return path


def check_leaderboard_path(path: str | Path) -> Path:
    """Reject a file name that isn't JSON, before long work."""
    path = Path(path)
    if path.suffix != ".json":
        what, fix = "a leaderboard is a JSON file", "use a name such as board.json"
        raise BitwrightError(what, where="--output", value=str(path), fix=fix, code="not-json")
    return path


def write_leaderboard_page(
    board: Leaderboard, path: str | Path, *, results: str = "leaderboard.json", reports: str | Path | None = None
) -> Path:
    """Write the page atomically, with links to existing reports of rows in the folder `reports`.

    `results` is the name of the leaderboard's file in the commands on the page.
    """
    found = {} if reports is None else report_links(board, Path(path), Path(reports))
    return write_text(Path(path), leaderboard_page(board, results=results, reports=found))


def report_links(board: Leaderboard, path: Path, reports: Path) -> dict[str, str]:
    """Relative addresses of the reports that exist, by row."""
    if not reports.is_dir():
        what, fix = "the folder doesn't exist", f"run bitwright grid run grid.yaml --reports {reports}"
        raise BitwrightError(what, where="--reports", value=str(reports), fix=fix, code="no-such-folder")
    found = {}
    for one in board.rows:
        report = report_folder(reports, one.id) / "report.html"
        if report.is_file():
            found[one.id] = quote(Path(os.path.relpath(report.resolve(), path.resolve().parent)).as_posix())
    return found


def leaderboard_page(
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
    found = [Card(title="Rows done", value=f"{states['done']} of {len(board.rows)}", lines=[left or "no rows left"])]
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


def leaderboard_markdown(board: Leaderboard) -> str:
    """The tables of a leaderboard."""
    return "\n".join(_markdown_parts(board)) + "\n"


def _markdown_parts(board: Leaderboard) -> Iterator[str]:
    states = Counter(row.status for row in board.rows)
    yield f"# {escaped(board.title or board.name)}"
    yield ""
    yield f"{counted(len(board.rows), 'row')}: {', '.join(f'{count} {state}' for state, count in states.items())}. "
    minutes = sum(row.cpu_minutes or 0.0 for row in board.rows)
    yield f"{minutes:.1f} CPU minutes. Points below float are below {drop_reference(board)}; "
    yield "± is the deviation over all rows taken together. Config " + escaped(board.config_hash) + "."
    notes = board.config.get("notes") or ()
    for note in notes:
        yield f"\n{escaped(str(note))}"
    if board.floats:
        yield ""
        heads = ["model", "#seed", "#float", "#trained on as long as a row"]
        floats = board.floats
        yield table(heads, [(o.model, str(o.seed), f"{o.accuracy:.2f}", _value(o.trained_on)) for o in floats])
    yield from _overall_table(board)
    for model in dict.fromkeys(row.model for row in board.rows):
        for bits in dict.fromkeys(row.bits for row in board.rows):
            yield from _accuracy_table(board, model, bits)
    yield from _scheme_table(board)
    yield from _gap_table(board)
    yield from _reasons_table(board.rows)
    yield ""
    for key, machine in board.machines.items():
        versions = ", ".join(f"{name} {version}" for name, version in machine.packages.items())
        code = f"Bitwright {machine.bitwright}" + (f" ({machine.revision})" if machine.revision else "")
        yield escaped(
            f"Machine {key}: {machine.cpu}, {' and '.join(dict.fromkeys(machine.instructions))}, "
            f"{counted(machine.threads, 'thread')}, Python {machine.python}, {code}, {versions}."
        )


def _overall_table(board: Leaderboard) -> Iterator[str]:
    """Points below float by algorithm and width, best first, and their deviation over backends and models."""
    widths = list(dict.fromkeys(row.bits for row in board.rows))
    shared = comparable(board.rows)
    rows: dict[tuple[str, int], Summary] = {}
    names = list(dict.fromkeys(row.algorithm for row in board.rows))
    for name in names:
        for bits in widths:
            own = [one for one in shared if (one.algorithm, one.bits) == (name, bits)]
            rows[name, bits] = summary(own, algorithm=name, bits=bits)
    names.sort(key=lambda name: _mean(rows[name, widths[-1]].drop))
    yield "\n## Points below float, over backends, models and seeds that all algorithms have\n"
    yield from _left_out(board.rows, shared)
    heads = ["algorithm", *(head for bits in widths for head in (f"#{bits} bits", "#over backends", "#over models"))]
    lines = []
    for name in names:
        cells = [name]
        for bits in widths:
            one = rows[name, bits]
            cells += [spread_text(one.drop), _value(one.over_backends), _value(one.over_models)]
        lines.append(cells)
    yield table(heads, lines)
    yield "\n“Over backends” and “over models” are deviations of mean points below float.\n"


def _left_out(rows: Sequence[Row], shared: Sequence[Row]) -> Iterator[str]:
    """Backends that are in no mean because some algorithm is not done there."""
    kept = {row.backend for row in shared}
    out = [backend for backend in dict.fromkeys(row.backend for row in rows) if backend not in kept]
    done = sum(row.accuracy is not None for row in rows)
    if len(shared) < done:
        names = f" (backends left out: {', '.join(map(escaped, out))})" if out else ""
        yield f"These are {len(shared)} of {counted(done, 'row')} that are done{names}.\n"


def _accuracy_table(board: Leaderboard, model: str, bits: int) -> Iterator[str]:
    """Accuracy of each algorithm on each backend."""
    own = [s for s in board.summaries if (s.model, s.bits) == (model, bits)]
    cells = {(s.algorithm, s.backend): s for s in own if None not in (s.algorithm, s.backend)}
    backends = list(dict.fromkeys(row.backend for row in board.rows))
    yield f"\n## {escaped(model)}, {bits} bits: accuracy, mean ± deviation over seeds\n"
    best = {b: max((_mean(cells[a, b].accuracy, -1.0) for a, c in cells if c == b), default=-1.0) for b in backends}
    lines = []
    for name in dict.fromkeys(row.algorithm for row in board.rows):
        texts = [escaped(name)]
        for backend in backends:
            one = cells.get((name, backend))
            if one is None:  # the grid has no such row
                texts.append("")
                continue
            text = spread_text(one.accuracy) or _state_names(one)
            mark = "**" if one.accuracy is not None and one.accuracy.mean == best[backend] else ""
            texts.append(f"{mark}{text}{mark}")
        lines.append(texts)
    yield table(["algorithm", *(f"#{backend}" for backend in backends)], lines, escape=False)


def _scheme_table(board: Leaderboard) -> Iterator[str]:
    """Points below float of each backend's scheme on each model, over algorithms and seeds."""
    groups = [s for s in board.summaries if s.algorithm is None and s.backend is not None]
    models = list(dict.fromkeys(row.model for row in board.rows))
    widths = list(dict.fromkeys(row.bits for row in board.rows))
    yield "\n## Points below float by backend, over algorithms that run on all of them\n"
    common = _always_done(board.rows)
    yield f"Algorithms: {', '.join(map(escaped, common)) or 'none'}.\n"
    lines = []
    for backend in dict.fromkeys(s.backend for s in groups):
        cells = [backend or ""]
        for model in models:
            for bits in widths:
                own = (
                    r.drop
                    for r in board.rows
                    if (r.backend, r.model, r.bits) == (backend, model, bits) and r.algorithm in common
                )
                cells.append(spread_text(spread(own)))
        lines.append(cells)
    yield table(["backend", *(f"#{model}, {bits} bits" for model in models for bits in widths)], lines)


def _always_done(rows: Sequence[Row]) -> list[str]:
    """Algorithms with all rows done: only these can be compared over backends."""
    return [
        name
        for name in dict.fromkeys(row.algorithm for row in rows)
        if all(row.status == "done" for row in rows if row.algorithm == name)
    ]


def _gap_table(board: Leaderboard) -> Iterator[str]:
    """Runtime minus simulated."""
    measured = [row for row in board.rows if row.device is not None and row.device.gap is not None]
    if not measured:
        return
    yield "\n## Hardware gap: accuracy on the runtime minus simulated, in points\n"
    lines = []
    for runtime, bits in dict.fromkeys((row.device.runtime, row.bits) for row in measured if row.device):
        own = [row.device for row in measured if row.device and (row.device.runtime, row.bits) == (runtime, bits)]
        gaps = [device.gap for device in own if device.gap is not None]
        kinds: Counter[str] = Counter()
        for device in own:
            kinds.update(device.kinds or {})
        text = ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
        mean, most = sum(gaps) / len(gaps), max(gaps, key=abs)
        lines.append((runtime, str(bits), str(len(gaps)), f"{mean:+.3f}", f"{most:+.3f}", text))
    yield table(["runtime", "#bits", "#rows", "#mean", "#largest", "products by type"], lines)


def _reasons_table(rows: Iterable[Row]) -> Iterator[str]:
    """Why rows have no accuracy, or none on the runtime."""
    why = reasons(rows)
    if not why:
        return
    yield "\n## Not done, and why\n"
    lines = [(what, name, backend, str(count), short_reason(reason)) for what, name, backend, reason, count in why]
    yield table(["what", "algorithm", "backend", "#rows", "reason"], lines)


def _state_names(one: Summary) -> str:
    return ", ".join(state for state in one.rows)


def _mean(value: Spread | None, otherwise: float = float("inf")) -> float:
    return otherwise if value is None else value.mean


def _value(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
