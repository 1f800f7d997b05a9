"""`bitwright leaderboard`: the page of a grid's results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bitwright.bench.leaderboard import Leaderboard
from bitwright.bench.page import write_page
from bitwright.cli.out import Out
from bitwright.cli.verb import verb


@verb(
    "leaderboard",
    examples="""
    bitwright leaderboard leaderboard.json -o leaderboard.html
    """,
)
def leaderboard(
    out: Out,
    results: Annotated[Path, typer.Argument(metavar="FILE", help="What a grid of `bitwright bench` has written.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page.", show_default=False)],
) -> None:
    """Write a grid's results as one page: filters, means and deviations, each row's config and what was executed."""
    board = Leaderboard.load(results)
    write_page(board, output)
    out.data({"page": str(output), "rows": len(board.rows), "config_hash": board.config_hash})
    out.say(f"{output}: {len(board.rows)} rows")
