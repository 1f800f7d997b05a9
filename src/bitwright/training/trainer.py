"""`Trainer(workload, precision="int8").fit()`: training in float, or quantized with one argument."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Unpack

from torch import nn

from bitwright.backends import Choices
from bitwright.backends.precisions import KERNEL_PRECISIONS, Precision, kernel_precision, resolve
from bitwright.core import formatting
from bitwright.core.arguments import strict
from bitwright.core.display import Progress, Summarized, Table
from bitwright.core.environment import keep_freed_memory
from bitwright.core.errors import BitwrightError, Problem, TrainError
from bitwright.core.files import write_text
from bitwright.core.interrupts import current_stop
from bitwright.core.output_folder import locked, staged_output
from bitwright.deployment.checkpoint import save_checkpoint
from bitwright.graph import capture
from bitwright.plan import Plan
from bitwright.ptq.quantize import Quantized
from bitwright.training.adaptive import Replanner, adaptive_problems
from bitwright.training.callbacks import Callback, EpochLog, History
from bitwright.training.checkpoints import Checkpoints, SavedCheckpoint, load_best, unsharded_state
from bitwright.training.config import TrainConfig
from bitwright.training.distributed import Ranks, device_of, process_group
from bitwright.training.low_precision import load_compute_plan
from bitwright.training.run import TrainingRun
from bitwright.workload import Workload, can_measure


@dataclass(frozen=True, kw_only=True)
class TrainResult(Summarized):
    """A trained model and the results of the run."""

    model: nn.Module
    quantized: Quantized | None  # None after a float run
    metric: str  # the workload's metric
    metrics: list[dict[str, float]]  # the metrics of each epoch
    best: dict[str, float] | None
    kept_epoch: int  # the epoch of the weights
    steps: int
    epochs: int
    stopped_early: bool
    notes: list[str]
    out: Path | None

    def summary(self) -> Iterator[Table | str]:
        """The metric after the last epoch, the best one, and the epoch of the weights."""
        went = f"{formatting.counted(self.epochs, 'epoch')}, {formatting.counted(self.steps, 'step')}"
        last = self.metrics[-1].get(self.metric) if self.metrics else None
        yield went if last is None else f"{self.metric} {formatting.metric_value(self.metric, last)} after {went}"
        if self.best is not None:
            value = formatting.metric_value(self.metric, self.best[self.metric])
            last_one = "" if self.kept_epoch == self.best["epoch"] else ", the last one; --patience keeps the best"
            best = f"best {value} in epoch {self.best['epoch']:.0f}"
            yield f"{best}; the weights are of epoch {self.kept_epoch}{last_one}"

    def __repr__(self) -> str:
        best = ", ".join(f"{name} {value:.4g}" for name, value in (self.best or {}).items() if name != "n")
        name = type(self.model).__name__
        went = f"{formatting.counted(self.epochs, 'epoch')}, {formatting.counted(self.steps, 'step')}"
        return f"<TrainResult {name}: {went}{', best ' + best if best else ''}>"

    def to_dict(self) -> dict[str, Any]:
        """Everything except the model as plain data."""
        return {
            "plan": None if self.quantized is None else self.quantized.plan.to_dict(),
            "metrics": self.metrics,
            "best": self.best,
            "steps": self.steps,
            "epochs": self.epochs,
            "stopped_early": self.stopped_early,
            "notes": self.notes,
            "out": None if self.out is None else str(self.out),
        }


@strict
class Trainer:
    """Trains a workload in float or, with `quantize`, with quantizers from the first step.

    `precision` is "int8", "int4", "w4a8", a Plan or its path; "qsync-int8" trains with kernels instead of quantizers.
    Processes come from the process group or from torchrun.
    `out` is the folder for checkpoints and history.jsonl, and at the end checkpoint.safetensors, plan.yaml and
    result.json. `compute` is a plan (or its path) with a `compute` section, which lists the operators that run in low
    precision. `kind` is the device kind of this process in that plan (or a comma-separated list, one per rank), and
    `simulate` rounds in float instead of using low-precision kernels. `adaptive`, such as a `ClusterReplanner`, plans
    for the ranks that are present, and again when one of them becomes slower or faster. `init` is a float checkpoint
    (or the folder of a run) to start from. `resume=True` continues the run in `out`, if there is one; "auto" does so
    only if that run did not finish. `choices` are passed to the planner, as in `bitwright.quantize`. On the command
    line, a signal ends the run between two steps, with a checkpoint.

    >>> from bitwright import TrainConfig, Trainer, load_workload
    >>> config = TrainConfig(batch=256, fuse=False)
    >>> trainer = Trainer(load_workload("digits-untrained"), precision="int8", config=config)
    >>> result = trainer.fit()
    >>> result.epochs, result.steps > 0, result.quantized is not None
    (1, True, True)
    """

    def __init__(
        self,
        workload: Workload,
        *,
        precision: Precision | None = None,
        compute: Plan | str | Path | None = None,
        kind: str | None = None,
        simulate: bool = False,
        adaptive: Replanner | None = None,
        backend: str | None = None,
        config: TrainConfig | None = None,
        out: str | Path | None = None,
        init: str | Path | None = None,
        resume: bool | Literal["auto"] = False,
        callbacks: Sequence[Callback] = (),
        progress: Progress | None = None,
        device: str | None = None,
        **choices: Unpack[Choices],
    ) -> None:
        self.workload = workload
        if isinstance(precision, str) and precision in KERNEL_PRECISIONS and compute is None:
            graph = capture(workload.model, workload.inputs)
            compute = kernel_precision(precision, graph, choices, model=workload.name)
            precision, choices = None, Choices()
        self.precision = precision
        self.compute = None if compute is None else load_compute_plan(compute)
        self.kind = kind
        self.simulate = simulate
        self.adaptive = adaptive
        self.backend = backend
        self.config = config or TrainConfig()
        self.out = Path(out) if out is not None else None
        self.init = Path(init) if init is not None else None
        self.resume = resume
        self.progress = progress
        self.callbacks = list(callbacks)
        self.device = device
        self.choices = choices
        problems = list(self._problems())
        if problems:
            raise TrainError(problems)

    def _problems(self) -> Any:
        """Problems that are visible before anything is loaded."""
        config, workload = self.config, self.workload
        where = f"workload {workload.name!r}"
        if self.precision is None:
            for name, value in self.choices.items():
                if value not in (None, [], ()):
                    what, fix = "a float run doesn't use this argument", 'add precision="int8" or another precision'
                    yield Problem(what=what, where=name, value=value, fix=fix, code="ignored-argument")
        if workload.training is None:
            fix = "pass Workload(training=...), a function that returns a data set of (inputs, target)"
            yield Problem(what="the workload has no training data", where=where, fix=fix, code="no-training-data")
        if workload.loss is None:
            fix = "pass Workload(loss=F.cross_entropy) or another loss"
            yield Problem(what="the workload has no loss", where=where, fix=fix, code="no-loss")
        if config.patience is not None:
            if not can_measure(workload):
                fix, value = "pass evaluation= or evaluate= to the Workload", config.patience
                what = "early stopping requires a metric"
                yield Problem(what=what, where="patience", value=value, fix=fix, code="metric-required")
            if self.out is None:
                what, fix = "early stopping saves the best checkpoint in a folder", "pass out="
                yield Problem(what=what, where="patience", fix=fix, code="out-required")
        if config.save_steps is not None and self.out is None:
            what = "checkpoints require a folder"
            yield Problem(what=what, where="save_steps", fix="pass out=", code="out-required")
        yield from config.problems()
        if self.init is not None and not self.init.exists():
            what, fix = "the checkpoint doesn't exist", "pass the folder of a run, or a .safetensors file"
            yield Problem(what=what, where="init", value=str(self.init), fix=fix, code="no-such-checkpoint")
        if self.resume is True and self.out is None:
            yield Problem(what="resuming requires a folder", where="resume", fix="pass out=", code="out-required")
        if self.compute is not None and self.precision is not None:
            what, fix = "quantizers and low-precision kernels can't be combined", "omit either compute or precision"
            yield Problem(what=what, where="compute", fix=fix, code="compute-and-quantize")
        if self.adaptive is not None:
            yield from adaptive_problems(config, quantizes=self.precision is not None)
        elif self.compute is None and (self.kind is not None or self.simulate):
            what, fix = "kind and simulate require a plan", "pass compute="
            yield Problem(what=what, where="kind, simulate", fix=fix, code="compute-required")
        if self.precision is None:
            given = [key for key, value in {**self.choices, "backend": self.backend}.items() if value]
            for key in given:
                what, fix = "a float run doesn't use this argument", 'add precision="int8"'
                yield Problem(what=what, where=key, fix=fix, code="ignored-argument")
            for key in ("quantizer_lr", "freeze_observers"):
                if getattr(config, key) is not None:
                    what, fix = "a float run has no quantizers", 'add precision="int8"'
                    yield Problem(what=what, where=key, fix=fix, code="ignored-argument")
        else:
            try:
                resolve(self.precision, self.backend, self.choices)
            except TrainError as error:
                yield from error.problems

    def fit(self) -> TrainResult:
        """Train the model. The allocator keeps freed memory for the rest of this process."""
        keep_freed_memory()
        stop = current_stop()
        with process_group(self.device) as ranks, self._locked(ranks):
            saved = self._saved(ranks)
            callbacks = [
                *self.callbacks,
                EpochLog(self.progress),
                *([History(self.out)] if self.out is not None else []),
            ]
            run = TrainingRun(
                workload=self.workload,
                config=self.config,
                ranks=ranks,
                precision=self.precision,
                backend=self.backend,
                choices=self.choices,
                out=self.out,
                init=self.init,
                device=device_of(self.device, ranks.local),
                callbacks=callbacks,
                resume=saved,
                stop=stop,
                compute=self.compute,
                kinds=self.kind,
                simulate=self.simulate,
                adaptive=self.adaptive,
            )
            try:
                with stop.deferred(), run.reported():  # signals take effect between two steps, after a checkpoint
                    run.train()
                    _finish(run)
            except BitwrightError as error:
                error.rank = ranks.rank
                raise
            finally:
                run.release()
        return TrainResult(
            model=run.model,
            quantized=run.qat.quantized if run.qat is not None else None,
            metric=self.workload.metric,
            metrics=run.metrics,
            best=run.best,
            kept_epoch=round(run.best["epoch"]) if run.best and self.config.patience is not None else run.epoch,
            steps=run.step,
            epochs=run.epoch,
            stopped_early=run.stopped_early,
            notes=run.notes,
            out=self.out,
        )

    @contextmanager
    def _locked(self, ranks: Ranks) -> Iterator[None]:
        """Lock the output folder on rank 0; a failure raises an error on all ranks."""
        if self.out is None:
            yield
            return
        with ExitStack() as stack:
            problem: dict[str, Any] | None = None
            if ranks.first:
                try:
                    stack.enter_context(locked(self.out))
                except BitwrightError as error:
                    problem = asdict(error.problems[0])
            problem = ranks.tell(problem)
            if problem is not None:
                raise TrainError.single(**problem)
            yield

    def _saved(self, ranks: Ranks) -> SavedCheckpoint | None:
        """The checkpoint to resume from, chosen by rank 0. An existing run is never overwritten."""
        if self.out is None:
            return None
        checkpoints = Checkpoints(self.out)
        latest = checkpoints.latest()
        # torchrun restarts all processes when one dies; they resume from the last checkpoint
        # (machines that join later count from zero)
        restarted = any(ranks.gather(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0))
        # "auto" also resumes a finished run: no steps are left, and changed settings are reported
        step, resume = ranks.tell([None if latest is None else latest.step, bool(self.resume) or restarted])
        if step is None:
            return None
        if not resume:
            raise TrainError.single(
                f"this folder already contains a run, saved at step {step}",
                where=str(self.out),
                fix="resume it (resume=True), or choose another folder (init= starts from the weights of a run)",
                code="run-exists",
            )
        return next((saved for saved in checkpoints.all() if saved.step == step), None)


def _finish(run: TrainingRun) -> None:
    """Assemble the trained model on all ranks, and write the result on rank 0."""
    if run.ema is not None:
        run.ema.put(run.model)
    best = run.checkpoints.best() if run.checkpoints is not None else None
    if run.config.patience is not None and best is not None and run.best is not None:
        load_best(run, best)
        run.note(f"the result is that of epoch {int(run.best['epoch'])}, the best one")
    if run.qat is not None:
        run.qat.finish()
    if run.low is not None:
        run.low.finish()
    if run.whole_model is not None:
        run.whole_model.load_state_dict(unsharded_state(run))
        run.model = run.whole_model
        if run.qat is not None:
            run.qat.quantized = replace(run.qat.quantized, model=run.model)
    run.model.eval()
    if run.out is None or not run.ranks.first:
        return
    plan = run.qat.plan if run.qat is not None else run.compute
    with staged_output(run.out) as folder:
        if plan is not None:
            plan.save(folder / "plan.yaml")
        save_checkpoint(run.model, folder / "checkpoint.safetensors")
        write_text(folder / "result.json", json.dumps(run.facts(), indent=1) + "\n")
        for callback in run.callbacks:
            callback.on_result(run, folder)
