"""`bitwright quickstart`: from nothing to a checked INT8 artefact and a page, in about a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bitwright.cli.data import calibration
from bitwright.cli.deliver import evaluate, latencies, show, write_artefacts, write_report
from bitwright.cli.out import Out
from bitwright.cli.verb import verb
from bitwright.core.output_folder import staged_output
from bitwright.deploy import export_float, readers
from bitwright.ptq.quantize import quantize
from bitwright.report import Size

_SEED, _EPOCHS = 0, 10


@verb(
    "quickstart",
    examples="""
    bitwright quickstart
    bitwright quickstart --output demo-output
    """,
)
def quickstart(
    out: Out,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for what is made.")] = Path(
        "bitwright-quickstart"
    ),
) -> None:
    """Train a small CNN on scikit-learn's digits, quantize, export, check and time it. Needs no download."""
    # scikit-learn takes a second to import, and no other verb needs it.
    from bitwright.zoo.workloads import digits

    runtimes = readers(Path("model.onnx"))
    with staged_output(output) as folder:
        with out.steps("training on digits", _EPOCHS) as step:
            workload = digits(on_epoch=lambda done, total, loss: step(done))
        before = evaluate(out, workload, workload.model, "float")
        with out.steps("exporting the float model"):
            reference = export_float(workload.model, folder / "model-float.onnx", workload.inputs)
        with out.steps("calibrating") as step:
            quantized = quantize(
                workload.model,
                calibration(workload),
                backend="onnxruntime",
                example=workload.inputs,
                progress=step,
                name=workload.name,
            )
        written = write_artefacts(out, quantized, folder)
        measured = [row for name in runtimes for row in latencies(out, workload, name, reference, written.path)]
        record = write_report(
            out,
            workload,
            quantized,
            folder,
            runtimes=runtimes,
            accuracies=before,
            float_size=Size(name="model-float.onnx", bytes=reference.stat().st_size),
            timings=measured,
            seed=_SEED,
            written=written,
        )
    show(out, record, output)
    out.say(f"open {output / 'report.html'} for the whole picture")
