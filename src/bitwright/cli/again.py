"""`bitwright bench leaderboard.json --row ID`: rows of a leaderboard, run again."""

from __future__ import annotations

from pathlib import Path

import typer

from bitwright.bench import Again, Leaderboard, run_again
from bitwright.bench.machine import revision
from bitwright.bench.rerun import find_rows, ran_elsewhere
from bitwright.cli.grid import quiet_training
from bitwright.cli.out import Out
from bitwright.cli.verb import CHECK_FAILED
from bitwright.core.errors import BitwrightError

SUFFIX = ".json"


def run(
    out: Out, file: Path, *, rows: list[str], workload: str | None, starts: Path | None, reports: Path | None
) -> None:
    """Run the rows, and say whether they came out as the file has them."""
    board = Leaderboard.load(file)
    if not rows:
        raise BitwrightError(
            "which rows shall run again?", where=str(file), fix="--row ID; ids are on the page (bitwright leaderboard)"
        )
    wanted = find_rows(board, rows)
    advice = {row.id: ran_elsewhere(board, row) for row in wanted}
    for text in dict.fromkeys(filter(None, advice.values())):
        own = [row for row, said in advice.items() if said == text]
        out.note(f"{', '.join(own[:3])}{' …' if len(own) > 3 else ''}: {text}")
    with out.units() as progress, quiet_training():
        ended = 0

        def watch(one: Again) -> None:
            nonlocal ended
            ended += 1
            progress(_name(one), ended, len(rows))

        found = run_again(board, rows, reports=reports, starts=starts, workload=workload, watch=watch)
    out.data({"rows": [_facts(one) for one in found]})
    heads = ["row", "what", "#in the file", "#now", "the same"]
    out.table(heads, map(_cells, found), title=board.title or board.name)
    for one in found:
        if one.report is not None:
            out.say(f"  {one.report}")
    if any(one.differences for one in found):
        for one in found:
            for difference in one.differences:
                out.stderr.print(f"{one.row.id}: {difference}")
        made = {board.machines[row.machine].revision or "unknown" for row in wanted if row.machine in board.machines}
        out.note(f"the rows are of revision {', '.join(sorted(made)) or 'unknown'}, this is {revision() or 'unknown'}")
        if not any(advice.values()):
            out.note("another kind of machine or another torch adds numbers in another order: `machines` in the file")
        raise typer.Exit(CHECK_FAILED)


def _name(one: Again) -> str:
    row = one.row
    return f"{row.model}, {row.algorithm}, {row.backend}, {row.bits} bits, seed {row.seed}"


def _facts(one: Again) -> dict[str, object]:
    return {
        "id": one.row.id,
        "was": one.row.accuracy,
        "accuracy": one.result.accuracy,
        "status": one.result.status,
        "differences": one.differences,
        "report": None if one.report is None else str(one.report),
    }


def _cells(one: Again) -> tuple[str, ...]:
    values: list[str] = [one.row.status, one.result.status]
    for index, accuracy in enumerate((one.row.accuracy, one.result.accuracy)):
        if accuracy is not None:
            values[index] = f"{accuracy:.2f}"
    return one.row.id, _name(one), *values, "no" if one.differences else "yes"
