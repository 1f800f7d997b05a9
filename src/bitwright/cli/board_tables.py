"""Print a leaderboard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bitwright.bench import Leaderboard
from bitwright.bench.leaderboard import (
    Summary,
    comparable,
    drop_reference,
    reasons,
    short_reason,
    spread_text,
    summary,
)
from bitwright.bench.rows import report_folder
from bitwright.cli.out import Out
from bitwright.core.formatting import counted


def show_board(out: Out, board: Leaderboard, files: list[Path]) -> None:
    """Print a leaderboard as a table, or as JSON."""
    out.data(board.to_dict())
    cells = [s for s in board.summaries if None not in (s.algorithm, s.backend, s.bits, s.model)]
    many = len(board.rows) > 60
    shown = list(_overall(board)) if many else cells
    heads = ["algorithm", "backend", "#bits", "model", "#accuracy", "#below float", "#on the runtime", "rows"]
    out.table(heads, map(_cells, shown), title=board.title or board.name)
    for what, algorithm, backend, reason, count in reasons(board.rows):
        out.say(f"{what}: {algorithm}, {backend}, {counted(count, 'row')}: {short_reason(reason)}")
    states = [row.status for row in board.rows]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    out.say(f"{counted(len(states), 'row')}: {counts}; config {board.config_hash}")
    out.say(f"“below float” is below {drop_reference(board)}")
    for path in files:
        out.say(f"  {path}")


def _overall(board: Leaderboard) -> Iterator[Summary]:
    """Each algorithm at each width, over the cells that all algorithms have."""
    shared = comparable(board.rows)
    for one in board.summaries:
        if one.backend is one.model is None:
            own = [row for row in shared if (row.algorithm, row.bits) == (one.algorithm, one.bits)]
            found = summary(own, algorithm=one.algorithm, bits=one.bits)
            yield found.model_copy(update={"rows": one.rows})


def show_reports(out: Out, board: Leaderboard, reports: Path, output: Path | None) -> None:
    """Print how many rows have a report, and the command that writes the others."""
    done = [row for row in board.rows if row.status == "done"]
    missing = [row for row in done if not (report_folder(reports, row.id) / "report.html").is_file()]
    out.say(f"{len(done) - len(missing)} of {len(done)} finished rows have a report in {reports}")
    if missing:
        command = f"bitwright grid rerun {output or 'leaderboard.json'} --row {missing[0].id} --reports {reports}"
        out.note(f"to write the others: {command}")


def _cells(one: Summary) -> tuple[str, ...]:
    states = ", ".join(f"{count} {state}" for state, count in one.rows.items())
    gap = "" if one.gap is None else f"{one.gap.mean:+.2f}"
    return (
        one.algorithm or "all",
        one.backend or "all",
        str(one.bits or "all"),
        one.model or "all",
        spread_text(one.accuracy) if one.model else "",
        spread_text(one.drop),
        gap,
        states,
    )
