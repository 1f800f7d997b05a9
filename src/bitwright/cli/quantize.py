"""`bitwright quantize`: quantize a model into a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bitwright.backends import Choices
from bitwright.cli.choosing import with_choices
from bitwright.cli.deliver import show
from bitwright.cli.options import HistogramsOption, SamplesOption, StepOption, WorkloadArg
from bitwright.cli.out import Out
from bitwright.cli.verb import verb
from bitwright.deployment import quantize_workload
from bitwright.plan import Plan
from bitwright.ptq import MEMORY


@verb(
    "quantize",
    examples="""
    bitwright quantize digits -o digits-int8
    bitwright quantize my_workload.py:small --observer mse --keep-float 'head*' -o out
    bitwright quantize my_workload.py:small --plan plan.yaml --samples 512 -o out
    bitwright quantize digits --weights int8/tensor/sym --step equalize --step bias-correction -o out
    bitwright quantize digits --weights int4/channel/sym --algorithm adaround:iterations=500 -o out
    """,
)
@with_choices
def quantize(
    out: Out,
    workload: WorkloadArg,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for what is made.", show_default=False)],
    backend: str,
    plan: Plan | None,
    choices: Choices,
    samples: SamplesOption = None,
    step: StepOption = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the random numbers that steps draw.")] = 0,
    memory: Annotated[
        int, typer.Option("--memory", min=1, help="MiB of activations that steps keep; more go to the disk.")
    ] = MEMORY,
    histograms: HistogramsOption = True,
) -> None:
    """Plan, calibrate, export and check a model; write plan, artefact, checkpoint and report.

    Accuracy is measured before and after, simulated and on the real runtime, if the workload says how. Steps are PTQ
    algorithms that win accuracy back without training; if they are interrupted or killed, rerun the same command: it
    resumes after the last layer or block that was finished.
    """
    with out.progress(f"loading {workload}") as progress:
        result = quantize_workload(
            workload,
            output,
            backend=backend,
            plan=plan,
            samples=samples,
            steps=step or [],
            seed=seed,
            memory=memory,
            histograms=histograms,
            progress=progress,
            **choices,
        )
    show(out, result)
