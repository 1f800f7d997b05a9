"""`bitwright quantize`: the whole road for one's own model."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from torch import nn

from bitwright.backends import Choices
from bitwright.backends import backend as find_backend
from bitwright.cli.choosing import with_choices
from bitwright.cli.data import calibration, open_workload
from bitwright.cli.deliver import evaluate, show, write_artefacts, write_report
from bitwright.cli.options import HistogramsOption, SamplesOption, StepOption, WorkloadArg
from bitwright.cli.out import Out
from bitwright.cli.verb import verb
from bitwright.core.errors import BitwrightError
from bitwright.core.files import write_text
from bitwright.core.interrupts import resumable
from bitwright.core.output_folder import staged_output
from bitwright.core.registry import RUNTIMES
from bitwright.deploy import available_runtimes
from bitwright.plan import Plan
from bitwright.ptq import MEMORY, read_steps
from bitwright.ptq.quantize import Quantized
from bitwright.ptq.quantize import quantize as quantize_model
from bitwright.quantizers import in_mode
from bitwright.report import Accuracy, Size, read_json

STATE = ".steps"  # where steps keep how far they are, while they run


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
    steps = read_steps(step or [])  # wrong names and settings are found at once
    runtimes = usable_runtimes(out, backend)
    state = output / STATE
    with resumable(lambda: _kept(state)), staged_output(output) as folder:
        found = open_workload(out, workload)
        _tell_overwritten(out, output, found.name)
        float_size = sum(t.numel() * t.element_size() for t in found.model.state_dict().values())
        before: list[Accuracy] = []

        def measure_float(model: nn.Module) -> None:
            before.extend(evaluate(out, found, model, "float"))

        with out.units() as tell:
            quantized = quantize_model(
                found.model,
                partial(calibration, found, samples),
                backend=backend,
                plan=plan,
                example=found.inputs,
                progress=lambda done: tell("calibrating", done, done),
                name=found.name,
                artefact=True,
                steps=steps,
                seed=seed,
                memory=memory,
                folder=state,
                keep_state=True,
                watch=lambda at: tell(f"{at.step}: {at.unit}", at.done, at.total),
                on_start=measure_float if steps else None,  # they change the float weights
                **choices,
            )
        if not steps:
            # Only now: whatever is wrong with the plan or the data is known before the first long evaluation.
            with in_mode(quantized.model, "float"):
                measure_float(quantized.model)
        written = write_artefacts(out, quantized, folder)
        _tell_steps(out, quantized, folder)
        record = write_report(
            out,
            found,
            quantized,
            folder,
            runtimes=runtimes,
            accuracies=before,
            float_size=Size(name="float weights", bytes=float_size),
            histograms=histograms,
            written=written,
        )
    shutil.rmtree(state, ignore_errors=True)  # only now: what the steps made is saved
    show(out, record, output)


def _kept(state: Path) -> str | None:
    if not state.is_dir():
        return None
    return f"the finished units of the steps are kept in {state}; rerun the command to resume"


def _tell_overwritten(out: Out, output: Path, workload: str) -> None:
    """Running a command again replaces its files; those of another workload may be a slip."""
    with suppress(BitwrightError):  # there is none, or a damaged one
        before = read_json(output / "report.json").workload
        if before != workload:
            out.note(f"{output} has what was made of {before!r}: it is replaced")


def _tell_steps(out: Out, quantized: Quantized, folder: Path) -> None:
    """What each step did is a file; here only how much it left alone."""
    if quantized.steps:
        ran = [asdict(one) for one in quantized.steps]
        write_text(folder / "steps.json", json.dumps(ran, indent=1, ensure_ascii=False) + "\n")
    for one in quantized.steps:
        if one.skipped:
            out.note(f"{one.step} left {len(one.skipped)} operators as they were; steps.json has the reasons")


def usable_runtimes(out: Out, backend: str) -> list[str]:
    """The backend's runtime if it reads Q/DQ ONNX, which is what these verbs write; else ONNX Runtime will do."""
    table = find_backend(backend)
    runtime = table.runtime or "onnxruntime"
    own = runtime in RUNTIMES and RUNTIMES.get(runtime).suffix != ".onnx"
    if own:
        out.note(f"{runtime} reads other artefacts: `bitwright bench` measures it, `bitwright export` writes them")
        runtime = "onnxruntime"
    if table.artefacts[0] != "qdq":
        if not own:
            out.note(f"the artefact is not checked: only {table.title} knows what to do with {table.artefacts[0]}")
        return []
    problem = available_runtimes().get(runtime, "nobody registers it")
    if problem is not None:
        out.note(f"the artefact is not checked: {runtime} can't be used here: {problem}")
        return []
    return [runtime]
