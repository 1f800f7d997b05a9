"""`bitwright grid leaderboard`: the leaderboard as an HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bitwright.cli.out import Out
from bitwright.cli.verb import verb
from bitwright.core.errors import BitwrightError


@verb(
    "grid leaderboard",
    examples="""
    bitwright grid leaderboard leaderboard.json -o leaderboard.html
    bitwright grid leaderboard leaderboard.json --reports reports -o leaderboard.html
    """,
)
def grid_leaderboard(
    out: Out,
    results: Annotated[Path, typer.Argument(metavar="FILE", help="The output of `bitwright grid run`.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page.", show_default=False)],
    reports: Annotated[
        Path | None,
        typer.Option(
            "--reports",
            metavar="FOLDER",
            help="Link each row to its report in this folder, the output of `bitwright grid run --reports`.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write a leaderboard as one page with filters, means and deviations, and each row's config.

    With --reports, rows link to their reports. Keep that folder in the same place relative to the page.
    """
    from bitwright.bench.leaderboard import Leaderboard
    from bitwright.core.formatting import counted
    from bitwright.reports.leaderboard import report_links, write_leaderboard_page

    board = Leaderboard.load(results)
    if reports is not None and not reports.is_dir():
        raise BitwrightError(
            "there is no such folder",
            where="--reports",
            value=str(reports),
            fix=f"run bitwright grid run grid.yaml --reports {reports}",
        )
    linked = 0 if reports is None else len(report_links(board, output, reports))
    write_leaderboard_page(board, output, results=results.name, reports=reports)
    out.data({"page": str(output), "rows": len(board.rows), "reports": linked, "config_hash": board.config_hash})
    out.say(f"{output}: {counted(len(board.rows), 'row')}{'' if reports is None else f', {linked} with a report'}")
