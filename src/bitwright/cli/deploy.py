"""`bitwright deploy`: export a trained model and measure it on the real runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bitwright.cli.options import FolderOption, WorkloadArg, option
from bitwright.cli.out import Out
from bitwright.cli.verb import verb


@verb(
    "deploy",
    examples="""
    bitwright deploy digits-untrained runs/int8 -o out
    bitwright deploy my_workload.py:net runs/int8 --reference runs/float -o out
    """,
)
def deploy(
    out: Out,
    workload: WorkloadArg,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Output folder of `train` or `quantize`.")],
    output: FolderOption,
    reference: Annotated[
        Path | None,
        option(
            "Float weights to compare with: an output folder or a file (default: those before the training).",
            "--reference",
        ),
    ] = None,
) -> None:
    """Export a trained model, check it on the real runtime, and measure accuracy and throughput on real data."""
    from bitwright.workflows import deploy as deploy_run

    with out.progress(f"loading {workload}") as progress:
        result = deploy_run(workload, run, output, reference=reference, progress=progress)
    out.show(result, output=output)
