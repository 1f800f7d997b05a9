"""A model that was made before: its plan, its checkpoint, and the artefact that was made of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bitwright.backends import problems_title
from bitwright.core.errors import BitwrightError, PlanError, Problem
from bitwright.deploy.checkpoint import load_checkpoint
from bitwright.graph import capture
from bitwright.plan import Plan
from bitwright.ptq.quantize import Quantized
from bitwright.quantizers import find_attachment, prepare
from bitwright.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Made:
    """What `bitwright quantize -o FOLDER` and its like leave behind."""

    plan: Plan
    checkpoint: Path
    artefact: Path | None = None  # without one it is exported anew

    @classmethod
    def load(cls, folder: str | Path) -> Made:
        """Read a folder."""
        folder = Path(folder)
        missing = [name for name in ("plan.yaml", "checkpoint.safetensors") if not (folder / name).is_file()]
        if missing:
            raise BitwrightError(
                f"the folder has no {' and no '.join(missing)}",
                where=str(folder),
                fix="give a folder that `bitwright quantize WORKLOAD -o FOLDER` has made",
            )
        artefact = folder / "model.onnx"
        return cls(
            plan=Plan.load(folder / "plan.yaml"),
            checkpoint=folder / "checkpoint.safetensors",
            artefact=artefact if artefact.is_file() else None,
        )


def load_prepared(workload: Workload, plan: Plan, checkpoint: Path) -> Quantized:
    """Prepare the workload's model in place, and load its state."""
    graph = capture(workload.model, workload.inputs)
    if problems := plan.validate(graph):
        raise PlanError(problems, title=problems_title(plan, workload.name))
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
