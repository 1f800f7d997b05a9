"""A model with a plan's quantizers and a checkpoint's ranges: what `export` and `check` begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bitwright.attach import find_attachment, prepare
from bitwright.checkpoint import load_checkpoint
from bitwright.errors import BitwrightError, PlanError, Problem
from bitwright.graph import capture
from bitwright.plan import Plan
from bitwright.recipe import Quantized
from bitwright.workload import Workload

PlanOption = Annotated[Path | None, typer.Option("--plan", help="The plan file.", show_default=False)]
CheckpointOption = Annotated[
    Path | None,
    typer.Option("--checkpoint", help="The prepared model's checkpoint (.safetensors).", show_default=False),
]


def read_plan(plan: Path | None, checkpoint: Path | None) -> tuple[Plan, Path]:
    """Both are needed; whatever can be seen of them without the model is seen now."""
    if plan is None or checkpoint is None:
        missing = [name for name, value in (("--plan", plan), ("--checkpoint", checkpoint)) if value is None]
        raise BitwrightError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing",
            fix="`bitwright quantize WORKLOAD -o DIR` writes both",
        )
    if not checkpoint.is_file():
        raise BitwrightError(
            "there is no such checkpoint", where=str(checkpoint), fix="give the path of a .safetensors file"
        )
    return Plan.load(plan), checkpoint


def load_prepared(workload: Workload, plan: Plan, checkpoint: Path) -> Quantized:
    """Prepare the workload's model in place, and load its state."""
    graph = capture(workload.model, workload.inputs)
    prepare(workload.model, plan, graph=graph)
    attachment = find_attachment(workload.model)
    if attachment is None:
        raise BitwrightError(
            "the plan quantizes nothing", fix="give at least one site a format, or export with --float"
        )
    load_checkpoint(workload.model, checkpoint)
    problems = [
        Problem(what="the checkpoint has no range for this site", where=site, fix="calibrate with this plan")
        for site, quantizer in attachment.quantizers.items()
        if not quantizer.ready
    ]
    if problems:
        raise PlanError(problems, title=f"{checkpoint} doesn't have all ranges of the plan")
    return Quantized(
        model=workload.model,
        plan=plan,
        graph=graph,
        example=workload.inputs,
        backend=plan.backend or "onnxruntime",
    )
