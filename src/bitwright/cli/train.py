"""`bitwright train`: a float run, or with `--quantize` the same run in low precision."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bitwright.cli.data import open_workload
from bitwright.cli.options import (
    ActivationsOption,
    FirstLastBitsOption,
    FoldingOption,
    KeepFloatOption,
    ObserverOption,
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
from bitwright.core.output_folder import visible_files
from bitwright.report import new_record, write_report
from bitwright.report.training import training_record
from bitwright.training import Callback, TensorBoard, TrainConfig, Trainer, tensorboard_problem
from bitwright.training.run import Run


@verb(
    "train",
    examples="""
    bitwright train digits-untrained --epochs 6 --lr 0.05 -o runs/float
    bitwright train digits-untrained --epochs 2 --init runs/float --quantize int8 -o runs/int8
    bitwright train my_workload.py:net --quantize int4 --distill 0.5 --epochs 3 -o runs/int4
    bitwright train my_workload.py:net --plan kernels.yaml --channels-last -o runs/kernels
    torchrun --nproc-per-node 2 -m bitwright train my_workload.py:net --quantize int8 -o runs/two
    """,
)
@with_settings(TrainConfig)
def train(
    out: Out,
    workload: WorkloadArg,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the run.", show_default=False)],
    settings: TrainConfig,
    quantize: Annotated[
        str | None,
        typer.Option(
            "--quantize",
            metavar="PRECISION",
            help="int8, int4, w4a8 (weights 4 bits, activations 8), or a plan.yaml; without it the run is float.",
            show_default=False,
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan", help="Run operators in real low precision, as this plan's `compute` says.", show_default=False
        ),
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(
            "--device-kind",
            help="This process's kind of device in the plan, or one for each rank: fast,slow.",
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
    """Train a workload, in float or (--quantize) quantized; the flag is the only difference.

    Quantizers are in place before DDP, the optimizer and the compiler. Several processes: start it with torchrun.
    Rerun the same command after an interruption or a kill: it resumes from the last checkpoint, to the bit.
    """
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
    elif tensorboard is None and os.environ.get("RANK", "0") == "0":  # one process speaks for all
        out.note(f"no TensorBoard logs: {missing}")
    bar = _Bar(out)
    result = Trainer(
        found,
        quantize=quantize,
        compute=plan,
        kind=kind,
        simulate=simulate,
        backend=backend,
        config=settings,
        out=output,
        init=init,
        resume=resume or "auto",
        callbacks=[*callbacks, bar, _Report()],
        device=device,
        **choices,
    ).fit()
    if not bar.spoken:  # rank 0 speaks for all
        return
    if bar.begun == result.steps:
        out.note("this run had finished already: no step was trained, and its files were written again")
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


class _Report(Callback):
    """Write the report together with the result."""

    def on_result(self, run: Run, folder: Path) -> None:
        write_report(new_record(run.workload.name, seed=run.config.seed, training=training_record(folder)), folder)


class _Bar(Callback):
    """A bar with loss, metric and the time that is left; on a pipe, one line for each epoch."""

    def __init__(self, out: Out) -> None:
        self.out = out
        self.spoken = False
        self.progress: Progress | None = None
        self.losses: list[tuple[int, float]] = []  # this epoch's: after how many steps, the mean since the last one
        self.begun = 0

    def on_start(self, run: Run) -> None:
        self.spoken = True
        self.begun = run.step
        out = self.out
        if out.json or out.quiet or not out.stderr.is_terminal:
            return
        columns = [
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        ]
        self.progress = Progress(*columns, console=out.stderr, transient=True)
        self.task = self.progress.add_task("", total=run.steps, completed=run.step)
        self.progress.start()

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        self.losses.append((run.step, values["loss"]))

    def _epoch_loss(self) -> float | None:
        """The mean over the epoch's steps; what was logged last may be of one step alone."""
        total, last = 0.0, self.begun
        for step, loss in self.losses:
            total, last = total + loss * (step - last), step
        return total / (last - self.begun) if last > self.begun else None

    def on_step(self, run: Run) -> None:
        if self.progress is None:
            return
        said = [f"epoch {run.epoch + 1}/{run.config.epochs}"]
        if run.loss is not None:
            said.append(f"loss {run.loss:.4f}")
        metric = run.workload.metric
        if run.metrics and metric in run.metrics[-1]:
            said.append(f"{metric} {formatting.metric_value(metric, run.metrics[-1][metric])}")
        self.progress.update(self.task, completed=run.step, description=", ".join(said))

    def on_epoch(self, run: Run, values: dict[str, float]) -> None:
        shown = ", ".join(
            f"{name} {formatting.metric_value(name, value)}" for name, value in values.items() if name != "n"
        )
        mean = self._epoch_loss()
        self.losses, self.begun = [], run.step
        loss = "" if mean is None else f"loss {mean:.4f}, "
        self.out.say(f"epoch {run.epoch}/{run.config.epochs}: {loss}{shown}")

    def on_end(self, run: Run) -> None:
        if self.progress is not None:
            self.progress.stop()
