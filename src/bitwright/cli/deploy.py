"""`bitwright deploy`: from a trained run to an artefact, measured on the real runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bitwright.backends import backend as find_backend
from bitwright.bench.prepared_model import load_prepared
from bitwright.cli.data import open_workload
from bitwright.cli.deliver import evaluate, latencies, show, write_artefacts, write_report
from bitwright.cli.options import WorkloadArg
from bitwright.cli.out import Out
from bitwright.cli.prepared import read_plan
from bitwright.cli.quantize import usable_runtimes
from bitwright.cli.verb import verb
from bitwright.core.errors import BitwrightError, PlanError
from bitwright.core.output_folder import staged_output
from bitwright.deploy import export_float
from bitwright.deploy.checkpoint import checkpoint_file, load_checkpoint
from bitwright.graph import capture
from bitwright.plan import Plan
from bitwright.report import Size
from bitwright.report.training import training_record, weights_before
from bitwright.workload import Workload


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
    if not (run / "checkpoint.safetensors").is_file() or not (run / "plan.yaml").is_file():
        what = "there is no such folder" if not run.is_dir() else "this is not the folder of a quantized run"
        fix = "give what `bitwright train --quantize … -o RUN` or `bitwright quantize … -o RUN` wrote"
        raise BitwrightError(what, where=str(run), fix=fix)
    plan, checkpoint = read_plan(run / "plan.yaml", run / "checkpoint.safetensors")
    backend = plan.backend or "onnxruntime"
    find_backend(backend)
    runtimes = usable_runtimes(out, backend)
    with staged_output(output) as folder:
        found = open_workload(out, workload)
        float_weights = reference or weights_before(run)
        _same_model(found, plan, run)
        if float_weights is not None:
            load_checkpoint(found.model, checkpoint_file(float_weights))
        before = evaluate(out, found, found.model, "float")
        with out.steps("exporting the float model"):
            yardstick = export_float(found.model, folder / "model-float.onnx", found.inputs)
        quantized = load_prepared(found, plan, checkpoint)
        written = write_artefacts(out, quantized, folder)
        measured = [row for name in runtimes for row in latencies(out, found, name, yardstick, written.path)]
        record = write_report(
            out,
            found,
            quantized,
            folder,
            runtimes=runtimes,
            accuracies=before,
            float_size=Size(name="model-float.onnx", bytes=yardstick.stat().st_size),
            timings=measured,
            training=training_record(run),
            written=written,
        )
    show(out, record, output)


def _same_model(workload: Workload, plan: Plan, run: Path) -> None:
    """A run of another workload, whose plan doesn't fit, is told as such and not tensor by tensor."""
    if plan.model in (None, workload.name):
        return
    try:
        plan.resolve(capture(workload.model, workload.inputs))
    except PlanError as error:
        raise BitwrightError(
            f"this run is of another workload, {plan.model!r}, and its plan doesn't fit {workload.name!r}",
            where=str(run),
            value=f"{len(error.problems)} problems",
            fix=f"deploy the workload {plan.model!r}, or a run of {workload.name!r}",
        ) from error
