"""`bitwright check`: compare an artefact on the real runtime with the simulated model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bitwright.cli.options import (
    CheckpointOption,
    ModelOption,
    PlanOption,
    SamplesOption,
    WorkloadArg,
    option,
    saved_model,
)
from bitwright.cli.out import Out
from bitwright.cli.verb import verb


@verb(
    "check",
    examples="""
    bitwright check digits out/model.onnx --model out
    bitwright check digits m.onnx --plan p.yaml --checkpoint c.safetensors --runtime openvino --per-site
    """,
)
def check(
    out: Out,
    workload: WorkloadArg,
    artefact: Annotated[Path, typer.Argument(metavar="ARTEFACT", help="The exported file.")],
    model: ModelOption = None,
    plan: PlanOption = None,
    checkpoint: CheckpointOption = None,
    runtime: Annotated[
        str | None, option("A runtime, or `all` that can be used here (default: that of the plan's backend).")
    ] = None,
    per_site: Annotated[bool, option("Also compare the codes at every site.", "--per-site")] = False,
    samples: SamplesOption = None,
) -> None:
    """Run an artefact on the real runtime and compare it with the simulated model and with the float model.

    Exits with 1 if an output diverges, or if weights or scales of the file differ from the model's, and names the
    first such site. A large distance from the float model is only a warning.
    """
    from bitwright.workflows import check_workload

    with out.progress(f"loading {workload}") as progress:
        results = check_workload(
            workload,
            artefact,
            saved_model(model, plan, checkpoint),
            runtime=runtime,
            per_site=per_site,
            samples=samples,
            progress=progress,
        )
    out.show_all(results)
