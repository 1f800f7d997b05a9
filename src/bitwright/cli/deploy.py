"""`bitwright deploy`: export a trained model and measure it on the real runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bitwright.cli.deliver import show
from bitwright.cli.options import WorkloadArg
from bitwright.cli.out import Out
from bitwright.cli.verb import verb
from bitwright.deployment import deploy as deploy_run


@verb(
    "deploy",
    examples="""
    bitwright deploy digits-untrained runs/int8 -o out
    bitwright deploy my_workload.py:net runs/int8 --float runs/float -o out
    """,
)
def deploy(
    out: Out,
    workload: WorkloadArg,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of `bitwright train --quantize` or `quantize`.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for what is made.", show_default=False)],
    reference: Annotated[
        Path | None,
        typer.Option(
            "--float",
            help="Float weights to compare with: a run's folder, or a file (default: what the run began with).",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Export a trained model, check it on the real runtime, and measure accuracy and throughput on real data."""
    with out.progress(f"loading {workload}") as progress:
        result = deploy_run(workload, run, output, reference=reference, progress=progress)
    show(out, result)
