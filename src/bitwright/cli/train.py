"""`bitwright train`: train in float, or with `--precision` or `--plan` in low precision."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from bitwright.cli.data import open_workload
from bitwright.cli.options import (
    ActivationsOption,
    FirstLastBitsOption,
    FoldingOption,
    KeepFloatOption,
    ObserverOption,
    PrecisionOption,
    QuantizerOption,
    WeightObserverOption,
    WeightQuantizerOption,
    WeightsOption,
    WorkloadArg,
    chosen,
)
from bitwright.cli.out import Out
from bitwright.cli.settings import with_settings
from bitwright.cli.verb import verb
from bitwright.core import formatting
from bitwright.core.errors import BitwrightError
from bitwright.training.config import TrainConfig


@verb(
    "train",
    examples="""
    bitwright train digits-untrained --epochs 6 --lr 0.05 -o runs/float
    bitwright train digits-untrained --epochs 2 --init runs/float --precision int8 -o runs/int8
    bitwright train my_workload.py:net --precision int4 --distill 0.5 --epochs 3 -o runs/int4
    bitwright train my_workload.py:net --plan kernels.yaml --channels-last -o runs/kernels
    torchrun --nproc-per-node 2 -m bitwright train my_workload.py:net --precision int8 -o runs/two
    """,
)
@with_settings(TrainConfig)
def train(
    out: Out,
    workload: WorkloadArg,
    output: Annotated[Path, typer.Option("--output", "-o", help="Output folder.", show_default=False)],
    settings: TrainConfig,
    precision: PrecisionOption = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            help="A plan file: quantizers for its `sites`, or low-precision kernels for its `compute`.",
            show_default=False,
        ),
    ] = None,
    device_kind: Annotated[
        str | None,
        typer.Option(
            "--device-kind",
            help="The device kind of this process in the plan, or one for each rank: fast,slow.",
            show_default=False,
        ),
    ] = None,
    simulate: Annotated[bool, typer.Option("--simulate", help="Round in float instead of running kernels.")] = False,
    backend: Annotated[
        str | None,
        typer.Option(
            "--backend",
            help="The target: a name of `bitwright list backends`, or your own table.yaml "
            "(default: onnxruntime; academic below 8 bits).",
            show_default=False,
        ),
    ] = None,
    init: Annotated[
        Path | None,
        typer.Option("--init", help="Float weights to start from: a run's folder, or a file.", show_default=False),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue the run in this folder (the default for equal settings)."),
    ] = False,
    tensorboard: Annotated[
        bool | None,
        typer.Option(
            "--tensorboard/--no-tensorboard",
            help="Write TensorBoard logs into the folder (default: if it is installed).",
            show_default=False,
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", help="cpu, cuda, cuda:1, … (default: an accelerator if there is one)."),
    ] = None,
    first_last_bits: FirstLastBitsOption = None,
    weights: WeightsOption = None,
    activations: ActivationsOption = None,
    observer: ObserverOption = None,
    weight_observer: WeightObserverOption = None,
    quantizer: QuantizerOption = None,
    weight_quantizer: WeightQuantizerOption = None,
    keep_float: KeepFloatOption = None,
    fold: FoldingOption = None,
) -> None:
    """Train a workload, in float or (--precision) with quantizers.

    Quantizers are in place before DDP, the optimizer and the compiler. Several processes: start it with torchrun.
    Rerun the same command after an interruption or a kill: it resumes from the last checkpoint, to the bit.
    """
    from bitwright.cli.train_bar import TrainBar, TrainReport
    from bitwright.core.output_folder import visible_files
    from bitwright.training import Callback, TensorBoard, Trainer, tensorboard_problem

    choices = chosen(
        None,
        weights=weights,
        activations=activations,
        observer=observer,
        weight_observer=weight_observer,
        quantizer=quantizer,
        weight_quantizer=weight_quantizer,
        keep_float=keep_float or [],
        first_last_bits=first_last_bits,
        fold=fold,
    )
    found = open_workload(out, workload)
    callbacks: list[Callback] = []
    missing = tensorboard_problem()
    if tensorboard or (tensorboard is None and missing is None):
        callbacks.append(TensorBoard(output / "tensorboard"))
    elif tensorboard is None and os.environ.get("RANK", "0") == "0":
        out.note(f"no TensorBoard logs: {missing}")
    quantize, compute = _precision(precision, plan)
    bar = TrainBar(out)
    result = Trainer(
        found,
        quantize=quantize,
        compute=compute,
        kind=device_kind,
        simulate=simulate,
        backend=backend,
        config=settings,
        out=output,
        init=init,
        resume=resume or "auto",
        callbacks=[*callbacks, bar, TrainReport()],
        device=device,
        **choices,
    ).fit()
    if not bar.spoken:  # only rank 0 prints
        return
    if bar.begun == result.steps:
        out.note("this run was already finished: no step was trained, and the report was written again")
    files = {file.name: str(file) for file in visible_files(output)}
    out.data({"files": files, "metrics": result.metrics, "best": result.best, "steps": result.steps})
    last = result.metrics[-1] if result.metrics else {}
    if found.metric in last:
        best = ""
        if result.best is not None:
            value = formatting.metric_value(found.metric, result.best[found.metric])
            best = f" (best {value} in epoch {result.best['epoch']:.0f})"
        went = f"{formatting.counted(result.epochs, 'epoch')}, {formatting.counted(result.steps, 'step')}"
        out.say(f"{found.metric} {formatting.metric_value(found.metric, last[found.metric])} after {went}{best}")
        if result.best is not None:
            kept = result.best["epoch"] if settings.patience is not None else result.epochs
            more = "" if kept == result.best["epoch"] else ", the last one; --patience keeps the best"
            out.say(f"checkpoint.safetensors is that of epoch {kept:.0f}{more}")
    for file in files.values():
        out.say(f"  {file}")


def _precision(precision: str | None, plan: Path | None) -> tuple[str | None, Path | None]:
    """What `Trainer` gets as `quantize` and `compute`."""
    if plan is None:
        return precision, None
    from bitwright.plan import Plan

    found = Plan.load(plan)
    if found.compute or found.devices or not any(True for _ in found.quantized):
        return precision, plan
    if precision is not None:
        fix = "leave out --precision or --plan"
        raise BitwrightError("this plan has formats already", where=str(plan), fix=fix, code="ignored-argument")
    return str(plan), None
