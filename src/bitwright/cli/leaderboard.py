"""`bitwright leaderboard`: the page of a grid's results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bitwright.bench.leaderboard import Leaderboard
from bitwright.cli.out import Out
from bitwright.cli.verb import verb
from bitwright.core.errors import BitwrightError
from bitwright.core.formatting import counted
from bitwright.report.leaderboard_page import links, write_page


@verb(
    "leaderboard",
    examples="""
    bitwright leaderboard leaderboard.json -o leaderboard.html
    bitwright leaderboard leaderboard.json --reports reports -o leaderboard.html
    """,
)
def leaderboard(
    out: Out,
    results: Annotated[Path, typer.Argument(metavar="FILE", help="What a grid of `bitwright bench` has written.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page.", show_default=False)],
    reports: Annotated[
        Path | None,
        typer.Option(
            "--reports",
            metavar="FOLDER",
            help="Link each row to its report in this folder, which `bitwright bench --reports` has made.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write a grid's results as one page: filters, means and deviations, each row's config and what was executed.

    Rows link to their whole reports where there are some (--reports): keep the folder where it is beside the page.
    """
    board = Leaderboard.load(results)
    if reports is not None and not reports.is_dir():
        raise BitwrightError(
            "there is no such folder",
            where="--reports",
            value=str(reports),
            fix=f"make it: bitwright bench grid.yaml --reports {reports}",
        )
    linked = 0 if reports is None else len(links(board, output, reports))
    write_page(board, output, results=results.name, reports=reports)
    out.data({"page": str(output), "rows": len(board.rows), "reports": linked, "config_hash": board.config_hash})
    out.say(f"{output}: {counted(len(board.rows), 'row')}{'' if reports is None else f', {linked} with a report'}")
