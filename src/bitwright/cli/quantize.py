"""`bitwright quantize`: the whole road for one's own model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bitwright.attach import in_mode
from bitwright.backends import backend as find_backend
from bitwright.cli.data import calibration, open_workload
from bitwright.cli.deliver import evaluate, show, write_artefacts, write_report
from bitwright.cli.options import (
    ActivationsOption,
    BackendOption,
    FoldingOption,
    KeepFloatOption,
    ObserverOption,
    PlanFileOption,
    QuantizerOption,
    SamplesOption,
    SaturatingOption,
    WeightObserverOption,
    WeightQuantizerOption,
    WeightsOption,
    WorkloadArg,
    chosen,
    load_plan,
    target,
)
from bitwright.cli.out import Out
from bitwright.cli.staging import filling
from bitwright.cli.verb import verb
from bitwright.deploy import available_runtimes
from bitwright.recipe import quantize as quantize_model
from bitwright.registry import RUNTIMES
from bitwright.report import Size


@verb(
    "quantize",
    examples="""
    bitwright quantize digits -o digits-int8
    bitwright quantize my_workload.py:small --observer mse --keep-float 'head*' -o out
    bitwright quantize my_workload.py:small --plan plan.yaml --samples 512 -o out
    """,
)
def quantize(
    out: Out,
    workload: WorkloadArg,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for what is made.", show_default=False)],
    backend: BackendOption = None,
    plan: PlanFileOption = None,
    weights: WeightsOption = None,
    activations: ActivationsOption = None,
    observer: ObserverOption = None,
    weight_observer: WeightObserverOption = None,
    quantizer: QuantizerOption = None,
    weight_quantizer: WeightQuantizerOption = None,
    keep_float: KeepFloatOption = None,
    bn: FoldingOption = None,
    saturating: SaturatingOption = None,
    samples: SamplesOption = None,
) -> None:
    """Plan, calibrate, export and check a model; write plan, artefact, checkpoint and report.

    Accuracy is measured before and after, simulated and on the real runtime, if the workload says how.
    """
    choices = chosen(
        plan,
        weights=weights,
        activations=activations,
        observer=observer,
        weight_observer=weight_observer,
        quantizer=quantizer,
        weight_quantizer=weight_quantizer,
        keep_float=keep_float or [],
        bn=bn,
        saturating=saturating,
    )
    given = load_plan(plan)
    name = target(backend, given)
    runtimes = usable_runtimes(out, name)
    with filling(output) as folder:
        found = open_workload(out, workload)
        float_size = sum(t.numel() * t.element_size() for t in found.model.state_dict().values())
        with out.steps("calibrating") as step:
            quantized = quantize_model(
                found.model,
                calibration(found, samples),
                backend=name,
                plan=given,
                example=found.inputs,
                progress=step,
                name=found.name,
                artefact=True,
                **choices,
            )
        # Only now: whatever is wrong with the plan or the data is known before the first long evaluation.
        with in_mode(quantized.model, "float"):
            before = evaluate(out, found, quantized.model, "float")
        write_artefacts(out, quantized, folder)
        record = write_report(
            out,
            found,
            quantized,
            folder,
            runtimes=runtimes,
            accuracies=before,
            float_size=Size(name="float weights", bytes=float_size),
        )
    show(out, record, output)


def usable_runtimes(out: Out, backend: str) -> list[str]:
    """The backend's runtime if it reads ONNX, which is what these verbs write; else ONNX Runtime will do."""
    runtime = find_backend(backend).runtime or "onnxruntime"
    if runtime in RUNTIMES and RUNTIMES.get(runtime).suffix != ".onnx":
        out.note(f"{runtime} reads other artefacts: `bitwright bench` measures it, `bitwright export` writes them")
        runtime = "onnxruntime"
    problem = available_runtimes().get(runtime, "nobody registers it")
    if problem is not None:
        out.note(f"the artefact is not checked: {runtime} can't be used here: {problem}")
        return []
    return [runtime]
