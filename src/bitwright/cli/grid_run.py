"""`bitwright grid run` and `grid show`: train a grid and show its leaderboard."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from logging import WARNING, getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bitwright.cli.out import Out
from bitwright.cli.verb import CHECK_FAILED, verb
from bitwright.core.errors import BitwrightError

if TYPE_CHECKING:
    from bitwright.bench import RowProgress

GridArg = Annotated[Path, typer.Argument(metavar="GRID.yaml", help="The file of the grid (docs/grid.md).")]
GridWorkloadOption = Annotated[
    str | None,
    typer.Option("--workload", help="The model, if the file doesn't name one.", show_default=False),
]
FloatWeightsOption = Annotated[
    Path | None,
    typer.Option("--starts", help="Folder of the float networks (default: next to the store).", show_default=False),
]
ReportsOption = Annotated[
    Path | None,
    typer.Option("--reports", metavar="FOLDER", help="Write the report of each row to FOLDER/ID.", show_default=False),
]
BoardOption = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Write the leaderboard as JSON, and as Markdown.", show_default=False),
]


@verb(
    "grid run",
    examples="""
    bitwright grid run grid.yaml -o leaderboard.json
    bitwright grid run mqbench/config.yaml --workload my_workload.py:resnet18
    bitwright grid run grid.yaml -o leaderboard.json --reports reports
    """,
)
def grid_run(
    out: Out,
    file: GridArg,
    workload: GridWorkloadOption = None,
    attempts: Annotated[
        int | None, typer.Option(min=1, help="How often a failing row is tried in total.", show_default=False)
    ] = None,
    starts: FloatWeightsOption = None,
    output: BoardOption = None,
    reports: ReportsOption = None,
) -> None:
    """Train every combination of a grid and make a leaderboard.

    Rerun the command to resume. Start it several times, on machines that share the store, to divide the work. Exits
    with 1 if a row failed or is pending, or if all rows were refused.
    """
    run_grid_file(out, file, workload, attempts, starts, output, reports, work=True)


def run_grid_file(
    out: Out,
    file: Path,
    workload: str | None,
    attempts: int | None,
    starts: Path | None,
    output: Path | None,
    reports: Path | None,
    *,
    work: bool,
) -> None:
    """Run (`work`) or read a grid, and print its leaderboard."""
    from bitwright.bench import GridConfig, run_grid
    from bitwright.cli.board_tables import show_board, show_reports
    from bitwright.core.files import write_text
    from bitwright.core.output_folder import replacing_with_siblings
    from bitwright.reports.leaderboard import leaderboard_markdown

    if output is not None and output.suffix != ".json":
        what = "a leaderboard is a JSON file"
        raise BitwrightError(what, where="--output", value=str(output), fix="-o board.json", code="not-json")
    config = GridConfig.load(file, workload=workload)
    if attempts is not None:
        config = config.model_copy(update={"attempts": attempts})
    for note in config.notes:
        out.note(note)
    with out.progress() as progress, quiet_training():

        def watch(told: RowProgress) -> None:
            task, result = told.task, told.result
            name = f"{task.model.label}, {task.algorithm.label}, {task.backend}, {task.bits} bits, seed {task.seed}"
            progress(told.done, told.total, name)
            if result.status in ("failed", "diverged"):
                out.note(f"{name}: {result.status}: {result.reason}")

        board = run_grid(config, starts=starts, reports=reports, watch=watch, work=work)
    files = []
    if output is not None:
        with replacing_with_siblings(output) as temporary:  # both or none
            board.save(temporary)
            write_text(temporary.with_suffix(".md"), leaderboard_markdown(board))
        files = [output, output.with_suffix(".md")]
    show_board(out, board, files)
    if reports is not None:
        show_reports(out, board, reports, output)
    states = {row.status for row in board.rows}
    if states & {"failed", "pending"} or states == {"refused"}:
        raise typer.Exit(CHECK_FAILED)


@contextmanager
def quiet_training() -> Iterator[None]:
    """Hide the notes of each training; the rows keep them."""
    log = getLogger("bitwright.training")
    level = log.level
    log.setLevel(WARNING)
    try:
        yield
    finally:
        log.setLevel(level)
