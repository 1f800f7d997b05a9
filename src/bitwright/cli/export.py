"""`bitwright export`: an artefact from a plan and a checkpoint."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bitwright.cli.data import open_workload
from bitwright.cli.options import WorkloadArg
from bitwright.cli.out import Out
from bitwright.cli.prepared import CheckpointOption, PlanOption, read_plan
from bitwright.cli.verb import verb
from bitwright.core import formatting

if TYPE_CHECKING:
    from bitwright.deployment import Runtime
    from bitwright.plan import Plan


@verb(
    "export",
    examples="""
    bitwright export digits --plan out/plan.yaml --checkpoint out/checkpoint.safetensors -o model.onnx
    bitwright export digits --plan out/plan.yaml --checkpoint out/checkpoint.safetensors --artefact qdq -o model.onnx
    bitwright export digits --float -o model-float.onnx
    bitwright export digits --plan out/plan.yaml --checkpoint out/checkpoint.safetensors -o model.pt2
    """,
)
def export(
    out: Out,
    workload: WorkloadArg,
    output: Annotated[Path, typer.Option("--output", "-o", help="The artefact to write.", show_default=False)],
    plan: PlanOption = None,
    checkpoint: CheckpointOption = None,
    artefact: Annotated[
        str | None,
        typer.Option("--artefact", help="Another artefact than the backend's first.", show_default=False),
    ] = None,
    as_float: Annotated[bool, typer.Option("--float", help="Export the float model.")] = False,
    static_batch: Annotated[
        bool, typer.Option("--static-batch", help="Fix the batch to that of the example inputs.")
    ] = False,
) -> None:
    """Write the artefact of a quantized model, or the float model. The suffix chooses the runtime.

    .onnx: Q/DQ with integer weights, or float with a file of quantization parameters; .pt2: a torch.export program for
    inductor; .pte: ExecuTorch; .param: ncnn, with the weights in .bin. .pt2 and .pte have the batch of the example.
    """
    from bitwright.core.output_folder import replacing_with_siblings
    from bitwright.core.registry import ARTEFACTS
    from bitwright.deployment import export as export_model
    from bitwright.deployment import export_float, readers
    from bitwright.deployment.onnx_files import stored_bytes
    from bitwright.ptq.quantize import load_prepared

    if output.suffix != ".onnx" and (own := readers(output)) != readers(Path("model.onnx")):
        _export_own(out, workload, output, None if as_float else read_plan(plan, checkpoint), own[0])
        return
    chosen = None if as_float else read_plan(plan, checkpoint)
    # Open the temporary file first, to fail early if the folder can't be written.
    with replacing_with_siblings(output) as temporary:
        found = open_workload(out, workload)
        if chosen is None:
            with out.steps("exporting"):
                export_float(found.model, temporary, found.inputs, dynamic_batch=not static_batch)
            facts: dict[str, object] = {"path": str(output), "bytes": stored_bytes(temporary)}
            text = "float"
        else:
            load_prepared(found, *chosen)
            with out.steps("exporting"):
                written = export_model(
                    found.model, temporary, found.inputs, dynamic_batch=not static_batch, artefact=artefact
                )
            facts = {**asdict(written), "path": str(output)}
            batch = "any batch" if written.dynamic_batch else "a fixed batch"
            text = f"{written.activation_pairs} Q/DQ pairs, {written.weights} integer weights, {batch}"
            if written.sidecar is not None:
                beside = ARTEFACTS.get(written.kind)().path(output)  # they move together
                facts["sidecar"] = str(beside)
                text = f"float with rounded weights, {batch}; its grids: {beside}"
    out.data(facts)
    out.say(f"{output}: {formatting.size(stored_bytes(output))}, {text}")


def _export_own(out: Out, workload: str, output: Path, chosen: tuple[Plan, Path] | None, runtime: str) -> None:
    """The artefact of a runtime that doesn't read ONNX."""
    from bitwright.core.output_folder import locked, replacing_with_siblings
    from bitwright.core.registry import RUNTIMES
    from bitwright.ptq.quantize import load_prepared

    kind: type[Runtime] = RUNTIMES.get(runtime)
    with locked(output.parent, name=output.name):  # fail early if the folder can't be written
        pass
    found = open_workload(out, workload)
    if chosen is not None:
        load_prepared(found, *chosen)
    with out.steps(f"exporting for {runtime}"), replacing_with_siblings(output) as temporary:
        (kind.write_float if chosen is None else kind.write)(found.model, temporary, found.inputs)
    size = kind.size(output)
    out.data({"path": str(output), "bytes": size, "runtime": runtime})
    out.say(f"{output}: {formatting.size(size)}, for {runtime}")
