"""`bitwright grid`: grids of trainings and their leaderboards."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from bitwright.cli.options import DataOption, GridWorkloadOption, IterationsOption, option, require
from bitwright.cli.out import Out
from bitwright.cli.verb import verb
from bitwright.core.formatting import counted

GridArg = Annotated[Path, typer.Argument(metavar="GRID.yaml", help="The file of the grid (docs/grid.md).")]
BoardArg = Annotated[Path, typer.Argument(metavar="LEADERBOARD.json", help="The output of `bitwright grid run`.")]
StartsOption = Annotated[Path | None, option("Folder of the float networks (default: next to the store).", "--starts")]
ReportsOption = Annotated[
    Path | None, option("Folder of the reports of rows: FOLDER/ID.", "--reports", metavar="FOLDER")
]
BoardOption = Annotated[Path | None, option("Write the leaderboard as JSON, and as Markdown.", "--output", "-o")]


@verb(
    "grid run",
    examples="""
    bitwright grid run grid.yaml -o leaderboard.json
    bitwright grid run mqbench/config.yaml --data imagenet
    bitwright grid run mqbench/config.yaml --workload my_workload.py:resnet18
    bitwright grid run grid.yaml -o leaderboard.json --reports reports
    """,
)
def grid_run(
    out: Out,
    file: GridArg,
    workload: GridWorkloadOption = None,
    data: DataOption = None,
    iterations: IterationsOption = None,
    attempts: Annotated[int | None, option("Total number of attempts for a failing row.", min=1)] = None,
    starts: StartsOption = None,
    output: BoardOption = None,
    reports: ReportsOption = None,
) -> None:
    """Train every combination of a grid and make a leaderboard.

    Rerun the command to resume. Start it several times, on machines that share the store, to divide the work. Exits
    with 1 if a row failed or is pending, or if all rows were refused.
    """
    options = {"workload": workload, "data": data, "iterations": iterations}
    _run(out, file, options, output, attempts, starts=starts, reports=reports)


@verb(
    "grid show",
    examples="""
    bitwright grid show grid.yaml
    bitwright grid show grid.yaml -o leaderboard.json
    """,
)
def grid_show(
    out: Out,
    file: GridArg,
    workload: GridWorkloadOption = None,
    data: DataOption = None,
    iterations: IterationsOption = None,
    starts: StartsOption = None,
    output: BoardOption = None,
) -> None:
    """Show the results of a grid without running anything.

    Exits with 1 if a row failed or is pending, or if all rows were refused.
    """
    options = {"workload": workload, "data": data, "iterations": iterations}
    _run(out, file, options, output, starts=starts, work=False)


def _run(
    out: Out, file: Path, options: dict[str, Any], output: Path | None, attempts: int | None = None, **more: Any
) -> None:
    from bitwright.bench import GridConfig, run_grid
    from bitwright.reports.leaderboard import check_leaderboard_path, write_leaderboard

    if output is not None:
        check_leaderboard_path(output)
    config = GridConfig.load(file, **options)
    if attempts is not None:
        config = config.model_copy(update={"attempts": attempts})
    with out.progress() as progress:
        board = run_grid(config, progress=progress, **more)
    if output is not None:
        write_leaderboard(board, output)
    out.show(board, output=output)


@verb("grid rerun", examples="bitwright grid rerun leaderboard.json --row 3f9c --reports reports")
def grid_rerun(
    out: Out,
    file: BoardArg,
    row: Annotated[
        list[str] | None, option("Id of a row, or its first characters; can be repeated.", metavar="ID")
    ] = None,
    workload: GridWorkloadOption = None,
    starts: StartsOption = None,
    reports: ReportsOption = None,
) -> None:
    """Run rows of a leaderboard again from their configs and seeds, and compare the results.

    Exits with 1 if a row's result differs.
    """
    from bitwright.bench import Leaderboard, rerun_rows

    board = Leaderboard.load(file)
    require("--row", row, "--row ID; the page of `bitwright grid leaderboard` shows the ids")
    with out.progress() as progress:
        reruns = rerun_rows(board, row or [], reports=reports, starts=starts, workload=workload, progress=progress)
    out.data({"rows": [one.to_dict() for one in reruns]})
    heads = ["row", "what", "#before", "#now", "same"]
    out.table(heads, [one.cells() for one in reruns], title=board.title or board.name)
    out.fail_if([f"{one.row.id}: {difference}" for one in reruns for difference in one.differences])


@verb(
    "grid leaderboard",
    examples="""
    bitwright grid leaderboard leaderboard.json -o leaderboard.html
    bitwright grid leaderboard leaderboard.json --reports reports -o leaderboard.html
    """,
    writes=("output",),
)
def grid_leaderboard(
    out: Out,
    file: BoardArg,
    output: Annotated[Path, option("The page.", "--output", "-o")],
    reports: ReportsOption = None,
) -> None:
    """Write a leaderboard as one page with filters, means and deviations, and each row's config.

    With --reports, rows link to their reports. Keep that folder in the same place relative to the page.
    """
    from bitwright.bench import Leaderboard
    from bitwright.reports.leaderboard import report_links, write_leaderboard_page

    board = Leaderboard.load(file)
    linked = 0 if reports is None else len(report_links(board, output, reports))
    write_leaderboard_page(board, output, results=file.name, reports=reports)
    facts = {"rows": len(board.rows), "reports": linked, "config_hash": board.config_hash}
    out.data({"output": str(output), **facts})
    out.say(f"{output}: {counted(len(board.rows), 'row')}, {linked} with a report")
