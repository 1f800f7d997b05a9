"""`bitwright quickstart`: train a small model, quantize it, and write a report, in about a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bitwright.cli.deliver import show
from bitwright.cli.out import Out
from bitwright.cli.verb import verb
from bitwright.zoo.quickstart import run_quickstart


@verb(
    "quickstart",
    examples="""
    bitwright quickstart
    bitwright quickstart --output demo-output
    """,
)
def quickstart(
    out: Out,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for what is made.")] = Path(
        "bitwright-quickstart"
    ),
) -> None:
    """Train a small CNN on scikit-learn's digits, quantize, export, check and time it. Needs no download."""
    with out.progress("training on digits") as progress:
        result = run_quickstart(output, progress=progress)
    show(out, result)
    out.say(f"open {output / 'report.html'} in a browser")
