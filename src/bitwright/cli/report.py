"""`bitwright report`: one page from what several runs recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bitwright.cli.options import option
from bitwright.cli.out import Out
from bitwright.cli.verb import verb


@verb(
    "report",
    writes=("output",),
    examples="""
    bitwright report digits-int8 -o page.html
    bitwright report tuned digits-int8 scored/report.json -o page.html
    bitwright report tuned digits-int8 -o page.md
    """,
)
def report(
    out: Out,
    runs: Annotated[
        list[Path], typer.Argument(metavar="FOLDER…", help="Folders (or report.json files) of runs of one workload.")
    ],
    output: Annotated[Path, option("The page: .html, .md or .json.", "--output", "-o")],
) -> None:
    """Write one page from what several runs of a workload recorded.

    The first run that quantized something is shown in full. Sensitivity, tuning, training, runtimes and forecasts come
    from the runs that have them. All runs are points of accuracy against latency and size.
    """
    from bitwright.reports.files import report as make_report

    record = make_report(runs, output)
    out.data({"output": str(output), **record.model_dump(mode="json")})
    out.say(f"{output}: {record.title}, {len(runs)} {'run' if len(runs) == 1 else 'runs'}")
