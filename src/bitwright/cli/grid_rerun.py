"""`bitwright grid rerun`: run rows of a leaderboard again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bitwright.cli.grid_run import FloatWeightsOption, GridWorkloadOption, ReportsOption, quiet_training
from bitwright.cli.out import Out
from bitwright.cli.verb import CHECK_FAILED, verb
from bitwright.core.errors import BitwrightError

if TYPE_CHECKING:
    from bitwright.bench import Rerun


@verb(
    "grid rerun",
    examples="""
    bitwright grid rerun leaderboard.json --row 3f9c --reports reports
    """,
)
def grid_rerun(
    out: Out,
    file: Annotated[Path, typer.Argument(metavar="LEADERBOARD.json", help="The output of `bitwright grid run`.")],
    row: Annotated[
        list[str] | None,
        typer.Option("--row", metavar="ID", help="Id of a row, or its first characters; can be repeated."),
    ] = None,
    workload: GridWorkloadOption = None,
    starts: FloatWeightsOption = None,
    reports: ReportsOption = None,
) -> None:
    """Run rows of a leaderboard again from their configs and seeds, and compare the results.

    Exits with 1 if a row's result differs.
    """
    from bitwright.bench import Leaderboard, rerun_rows
    from bitwright.bench.run_grid import find_rows, ran_elsewhere
    from bitwright.core.environment import revision

    board = Leaderboard.load(file)
    if not row:
        fix = "--row ID; the page of `bitwright grid leaderboard` shows the ids"
        raise BitwrightError("--row is required", where=str(file), fix=fix, code="no-row")
    wanted = find_rows(board, row)
    advice = {one.id: ran_elsewhere(board, one) for one in wanted}
    for text in dict.fromkeys(filter(None, advice.values())):
        own = [name for name, said in advice.items() if said == text]
        out.note(f"{', '.join(own[:3])}{' …' if len(own) > 3 else ''}: {text}")
    with out.progress() as progress, quiet_training():
        ended = 0

        def watch(one: Rerun) -> None:
            nonlocal ended
            ended += 1
            progress(ended, len(wanted), _name(one))

        found = rerun_rows(board, row, reports=reports, starts=starts, workload=workload, watch=watch)
    out.data({"rows": [_facts(one) for one in found]})
    heads = ["row", "what", "#before", "#now", "same"]
    out.table(heads, map(_cells, found), title=board.title or board.name)
    for one in found:
        if one.report is not None:
            out.say(f"  {one.report}")
    if any(one.differences for one in found):
        for one in found:
            for difference in one.differences:
                out.stderr.print(f"{one.row.id}: {difference}")
        made = {board.machines[row.machine].revision or "unknown" for row in wanted if row.machine in board.machines}
        out.note(
            f"the rows were made by revision {', '.join(sorted(made)) or 'unknown'}; this is {revision() or 'unknown'}"
        )
        if not any(advice.values()):
            out.note("another CPU or torch version rounds differently; compare with `machines` in the file")
        raise typer.Exit(CHECK_FAILED)


def _name(one: Rerun) -> str:
    row = one.row
    return f"{row.model}, {row.algorithm}, {row.backend}, {row.bits} bits, seed {row.seed}"


def _facts(one: Rerun) -> dict[str, object]:
    return {
        "id": one.row.id,
        "was": one.row.accuracy,
        "accuracy": one.result.accuracy,
        "status": one.result.status,
        "differences": one.differences,
        "report": None if one.report is None else str(one.report),
    }


def _cells(one: Rerun) -> tuple[str, ...]:
    values: list[str] = [one.row.status, one.result.status]
    for index, accuracy in enumerate((one.row.accuracy, one.result.accuracy)):
        if accuracy is not None:
            values[index] = f"{accuracy:.2f}"
    return one.row.id, _name(one), *values, "no" if one.differences else "yes"
