"""`bitwright export`: an artefact from a saved model, or from the float model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from bitwright.cli.options import CheckpointOption, ModelOption, PlanOption, WorkloadArg, exclude, option, saved_model
from bitwright.cli.out import Out
from bitwright.cli.verb import verb


@verb(
    "export",
    examples="""
    bitwright export digits --model out -o model.onnx
    bitwright export digits --plan out/plan.yaml --checkpoint out/checkpoint.safetensors --artefact qdq -o model.onnx
    bitwright export digits --float -o model-float.onnx
    bitwright export digits --model out -o model.pt2
    """,
)
def export(
    out: Out,
    workload: WorkloadArg,
    output: Annotated[Path, option("The artefact to write.", "--output", "-o")],
    model: ModelOption = None,
    plan: PlanOption = None,
    checkpoint: CheckpointOption = None,
    artefact: Annotated[str | None, option("Kind of artefact (default: the backend's first).")] = None,
    as_float: Annotated[bool, option("Export the float model.", "--float")] = False,
    static_batch: Annotated[bool, option("Fix the batch to that of the example inputs.", "--static-batch")] = False,
) -> None:
    """Write the artefact of a quantized model, or the float model. The suffix determines the runtime.

    .onnx: Q/DQ with integer weights, or float with a file of quantization parameters; .pt2: a torch.export program for
    inductor; .pte: ExecuTorch; .param: ncnn, with the weights in .bin; .tflite: LiteRT. .pt2, .pte and .tflite have the
    batch of the example.
    """
    from bitwright.workflows import export_workload

    if as_float:
        exclude("--float", {"--model": model, "--plan": plan, "--checkpoint": checkpoint, "--artefact": artefact})
    with out.progress(f"loading {workload}") as progress:
        result = export_workload(
            workload,
            output,
            None if as_float else saved_model(model, plan, checkpoint),
            artefact=artefact,
            dynamic_batch=not static_batch,
            progress=progress,
        )
    out.show(result, output=output)
