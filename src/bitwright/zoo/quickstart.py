"""The quickstart: train a small CNN on digits, quantize, export, check and time it."""

from __future__ import annotations

from pathlib import Path

from bitwright.backends import DEFAULT_BACKEND
from bitwright.core.output_folder import staged_output
from bitwright.core.progress import Progress, phases
from bitwright.deployment import export_float, readers
from bitwright.ptq.quantize import quantize
from bitwright.reports import Size
from bitwright.workflows import Deployment, accuracy, calibration, finish
from bitwright.zoo.workloads import digits

__all__ = ["run_quickstart"]

_SEED = 0


def run_quickstart(output: str | Path, *, progress: Progress | None = None) -> Deployment:
    """Write the quantized digits model and its report into a folder."""
    begin = phases(progress)
    runtimes = readers(Path("model.onnx"))
    with staged_output(output) as folder:
        workload = digits(on_epoch=lambda done, total, loss: progress and progress(done, total, "training on digits"))
        before = accuracy(workload, workload.model, "float", begin)
        begin("exporting the float model")
        float_file = export_float(workload.model, folder / "model-float.onnx", workload.inputs)
        quantized = quantize(
            workload.model,
            calibration(workload),
            backend=DEFAULT_BACKEND,
            example=workload.inputs,
            progress=progress,
            name=workload.name,
        )
        record = finish(
            workload,
            quantized,
            folder,
            runtimes=runtimes,
            accuracies=before,
            float_size=Size(name="model-float.onnx", bytes=float_file.stat().st_size),
            float_file=float_file,
            seed=_SEED,
            progress=progress,
        )
    return Deployment(folder=Path(output), record=record, quantized=quantized)
