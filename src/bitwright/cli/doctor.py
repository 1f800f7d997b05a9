"""`bitwright doctor`: what works on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from bitwright.cli.options import option
from bitwright.cli.out import Out
from bitwright.cli.verb import verb


@verb(
    "doctor",
    examples="""
    bitwright doctor
    bitwright doctor --json
    bitwright doctor --gpu -o gpu-doctor
    """,
)
def doctor(
    out: Out,
    gpu: Annotated[
        bool, option("Check and time the low-precision kernels on this device, and write a report.", "--gpu")
    ] = False,
    minutes: Annotated[float, option("With --gpu: the time limit.", min=0.0, show_default=True)] = 10.0,
    output: Annotated[
        Path, option("With --gpu: the folder of gpu-doctor.json and gpu-doctor.html.", "--output", "-o")
    ] = Path("gpu-doctor"),
) -> None:
    """Show which runtimes, kernels, tools, data sets and extras work here, and why the others don't.

    Runtimes are probed for the exactness of 8-bit products; low-precision training kernels are timed against FP32.
    Exits with 1 if no runtime can be used. --gpu uses the CUDA device, or else the CPU, and exits with 1 if a kernel
    gives wrong results.
    """
    if gpu:
        from bitwright.workflows.gpu_doctor import diagnose_gpu

        with out.progress() as progress:
            measured = diagnose_gpu(minutes=minutes, progress=progress)
        measured.save(output)
        out.show(measured, output=output)
        return
    from bitwright.workflows.doctor import diagnose

    with out.progress() as progress:
        diagnosis = diagnose(progress=progress)
    out.show(diagnosis)
