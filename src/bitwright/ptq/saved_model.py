"""`load(folder)`: a quantized model from the files that `Quantized.save` and the command line write."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from bitwright.backends import problems_title
from bitwright.core.arguments import strict
from bitwright.core.errors import BitwrightError, PlanError, Problem
from bitwright.core.registry import WORKLOADS
from bitwright.deployment.checkpoint import load_checkpoint
from bitwright.graph import capture
from bitwright.plan import Plan
from bitwright.ptq.quantize import Quantized
from bitwright.quantizers import find_attachment, prepare
from bitwright.workload import Workload, load_workload


@dataclass(frozen=True, kw_only=True)
class SavedModel:
    """The files of a saved model."""

    plan: Plan
    checkpoint: Path
    artefact: Path | None = None  # None: exported again when it is needed

    @classmethod
    def read(cls, folder: str | Path) -> SavedModel:
        """Find the files of an output folder, and read the plan."""
        folder = Path(folder)
        missing = [name for name in ("plan.yaml", "checkpoint.safetensors") if not (folder / name).is_file()]
        if missing:
            raise BitwrightError(
                f"the folder has no {' and no '.join(missing)}",
                where=str(folder),
                fix="give the output folder of `bitwright quantize`, or of Quantized.save",
                code="no-saved-model",
            )
        artefact = folder / "model.onnx"
        return cls(
            plan=Plan.load(folder / "plan.yaml"),
            checkpoint=folder / "checkpoint.safetensors",
            artefact=artefact if artefact.is_file() else None,
        )


@strict
def load(
    folder: str | Path, workload: Workload | str | None = None, *, model: nn.Module | None = None, inputs: Any = None
) -> Quantized:
    """Load a quantized model from an output folder of `Quantized.save`, `bitwright quantize`, `tune` or `train`.

    The folder has no code, so the float model comes from a `workload` (an object, a registered name or
    "file.py:function"), or from `model` with example `inputs`. By default it is the workload that the plan names.

    >>> import torch, bitwright, tempfile
    >>> folder, x = tempfile.mkdtemp(), torch.randn(16, 8)
    >>> bitwright.quantize(torch.nn.Sequential(torch.nn.Linear(8, 4)), [x]).save(folder) and None
    >>> bitwright.load(folder, model=torch.nn.Sequential(torch.nn.Linear(8, 4)), inputs=(x,))
    <Quantized Sequential for onnxruntime: 3 quantized sites>
    """
    saved = SavedModel.read(folder)
    if model is not None:
        if workload is not None or inputs is None:
            what = "give either a workload, or a model with inputs"
            raise BitwrightError(what, fix="load(folder, model=Net(), inputs=(x,))", code="ambiguous-model")
        example = inputs if isinstance(inputs, tuple | dict) else (inputs,)
        workload = Workload(name=saved.plan.model or type(model).__name__, model=model, inputs=example)
    elif workload is None:
        if saved.plan.model is None or saved.plan.model not in WORKLOADS:
            raise BitwrightError(
                "the folder doesn't name a registered workload",
                where=str(folder),
                value=saved.plan.model,
                fix='load(folder, "file.py:function"), or load(folder, model=Net(), inputs=(x,))',
                code="no-workload",
            )
        workload = saved.plan.model
    found = load_workload(workload) if isinstance(workload, str) else workload
    return load_prepared(found, saved.plan, saved.checkpoint)


def load_prepared(workload: Workload, plan: Plan, checkpoint: Path) -> Quantized:
    """Insert the plan's quantizers into the workload's model in place, and load the checkpoint."""
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
