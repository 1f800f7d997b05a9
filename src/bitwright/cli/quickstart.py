"""`bitwright quickstart`: train a small model, quantize it, and write a report, in about a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from bitwright.cli.options import option
from bitwright.cli.out import Out
from bitwright.cli.verb import verb


@verb(
    "quickstart",
    examples="""
    bitwright quickstart
    bitwright quickstart --output demo-output
    """,
)
def quickstart(
    out: Out,
    output: Annotated[Path, option("Output folder.", "--output", "-o", show_default=True)] = Path(
        "bitwright-quickstart"
    ),
) -> None:
    """Train a small CNN on scikit-learn's digits, quantize, export, check and time it. Needs no download."""
    from bitwright.workflows import run_quickstart

    with out.progress("training on digits") as progress:
        result = run_quickstart(output, progress=progress)
    out.show(result, output=output)
    out.say(f"open {output / 'report.html'} in a browser")
