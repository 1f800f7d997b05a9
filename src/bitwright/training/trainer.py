"""`Trainer(workload, quantize="int8").fit()`: one flag between a float run and a quantized one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Unpack

from torch import nn

from bitwright.backends import Choices
from bitwright.backends.precisions import Precision, resolve
from bitwright.core.allocator import keep_freed_memory
from bitwright.core.arguments import strict
from bitwright.core.errors import BitwrightError, Problem, TrainError
from bitwright.core.interrupts import current_stop
from bitwright.core.output_folder import locked
from bitwright.plan import Plan
from bitwright.ptq.quantize import Quantized
from bitwright.training.callbacks import Callback, History
from bitwright.training.checkpoints import Checkpoints, Saved
from bitwright.training.config import TrainConfig
from bitwright.training.distributed import Ranks, device_of, joined
from bitwright.training.low_precision import read
from bitwright.training.run import Run
from bitwright.workload import Workload, can_measure


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """A trained model, and how it came about."""

    model: nn.Module
    quantized: Quantized | None  # None after a float run
    metrics: list[dict[str, float]]  # of each epoch
    best: dict[str, float] | None
    steps: int
    epochs: int
    stopped_early: bool
    notes: list[str]
    out: Path | None


@strict
class Trainer:
    """Trains a workload, in float or (with `quantize`) with quantizers in place from before the first step.

    `quantize` is "int8", "int4", "w4a8", a Plan or the path of one. Processes come from the process group or from
    torchrun. `out` gets checkpoints, history.jsonl, and at the end checkpoint.safetensors, plan.yaml and result.json.
    `compute` is a plan (or its path) whose `compute` section says which operators run in real low precision; `kind` is
    this process's device in it (or one for each rank, with commas between), `simulate` rounds in float instead.
    `init` is a float checkpoint (or the folder of a run) to start from; `resume=True` continues the run in
    `out`, if there is one; "auto" does so only if that run did not finish. `choices` go to the planner, as in
    `bitwright.quantize`. A signal that the command line notes ends a run between two steps, with a checkpoint.
    """

    def __init__(
        self,
        workload: Workload,
        *,
        quantize: Precision | None = None,
        compute: Plan | str | Path | None = None,
        kind: str | None = None,
        simulate: bool = False,
        backend: str | None = None,
        config: TrainConfig | None = None,
        out: str | Path | None = None,
        init: str | Path | None = None,
        resume: bool | Literal["auto"] = False,
        callbacks: Sequence[Callback] = (),
        device: str | None = None,
        **choices: Unpack[Choices],
    ) -> None:
        self.workload = workload
        self.precision = quantize
        self.compute = None if compute is None else read(compute)
        self.kind = kind
        self.simulate = simulate
        self.backend = backend
        self.config = config or TrainConfig()
        self.out = Path(out) if out is not None else None
        self.init = Path(init) if init is not None else None
        self.resume = resume
        self.callbacks = list(callbacks)
        self.device = device
        self.choices = choices
        problems = list(self._problems())
        if problems:
            raise TrainError(problems)

    def _problems(self) -> Any:
        """What can be seen to be wrong before anything is loaded."""
        config, workload = self.config, self.workload
        where = f"workload {workload.name!r}"
        if self.precision is None:
            for name, value in self.choices.items():
                if value not in (None, [], ()):
                    what, fix = "this does nothing in a float run", 'give quantize="int8" (or another precision), too'
                    yield Problem(what=what, where=name, value=value, fix=fix, code="ignored-argument")
        if workload.training is None:
            fix = "give Workload(training=...) a function that returns a data set of (inputs, target)"
            yield Problem(what="the workload has no training data", where=where, fix=fix)
        if workload.loss is None:
            fix = "give Workload(loss=F.cross_entropy), or your own"
            yield Problem(what="the workload has no loss", where=where, fix=fix)
        if config.patience is not None:
            if not can_measure(workload):
                fix = "give the Workload evaluation= or evaluate="
                yield Problem(what="stopping early needs a metric", where="patience", value=config.patience, fix=fix)
            if self.out is None:
                fix = "give out=, a folder"
                yield Problem(what="stopping early keeps the best checkpoint", where="patience", fix=fix)
        if config.save_steps is not None and self.out is None:
            yield Problem(what="checkpoints need a folder", where="save_steps", fix="give out=")
        if config.warmup >= config.epochs:
            what = "the learning rate would only ever rise"
            yield Problem(what=what, where="warmup", value=config.warmup, fix=f"use less than {config.epochs} epochs")
        if self.init is not None and not self.init.exists():
            fix = "give the folder of a run, or a .safetensors file"
            yield Problem(what="there is no such checkpoint", where="init", value=str(self.init), fix=fix)
        if self.resume is True and self.out is None:
            yield Problem(what="there is no folder to resume", where="resume", fix="give out=")
        if self.compute is not None and self.precision is not None:
            what = "quantizers and low-precision kernels exclude each other"
            yield Problem(what=what, where="compute", fix="leave one of compute and quantize out")
        if self.compute is None and (self.kind is not None or self.simulate):
            yield Problem(what="only a plan's compute section has kinds and simulation", where="kind, simulate")
        if self.precision is None:
            given = [key for key, value in {**self.choices, "backend": self.backend}.items() if value]
            for key in given:
                yield Problem(what="a float run has no use for this", where=key, fix='add quantize="int8"')
            for key in ("quantizer_lr", "freeze_observers"):
                if getattr(config, key) is not None:
                    yield Problem(what="a float run has no quantizers", where=key, fix='add quantize="int8"')
        else:
            try:
                resolve(self.precision, self.backend, self.choices)
            except TrainError as error:
                yield from error.problems

    def fit(self) -> TrainResult:
        """Train. From then on this process keeps memory that it frees."""
        keep_freed_memory()
        stop = current_stop()
        with joined(self.device) as ranks, self._locked(ranks):
            saved = self._saved(ranks)
            callbacks = [*self.callbacks, *([History(self.out)] if self.out is not None else [])]
            run = Run(
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
            )
            try:
                with stop.deferred():  # a run stops between two steps, with a checkpoint
                    run.go()
            except BitwrightError as error:
                error.rank = ranks.rank
                raise
            finally:
                run.release()
        return TrainResult(
            model=run.model,
            quantized=run.qat.quantized if run.qat is not None else None,
            metrics=run.metrics,
            best=run.best,
            steps=run.step,
            epochs=run.epoch,
            stopped_early=run.stopped_early,
            notes=run.notes,
            out=self.out,
        )

    @contextmanager
    def _locked(self, ranks: Ranks) -> Iterator[None]:
        """The folder of the run is this run's alone: the first rank locks it, and all ranks hear if it can't."""
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

    def _saved(self, ranks: Ranks) -> Saved | None:
        """The checkpoint to go on from; rank 0 says which. A used folder is never overwritten by surprise."""
        if self.out is None:
            return None
        checkpoints = Checkpoints(self.out)
        latest = checkpoints.latest()
        # torchrun starts all processes again when one dies: they go on where the run was saved
        restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        # "auto" also resumes a finished run: it has no steps left, and other settings are refused with each difference
        step, resume = ranks.tell([None if latest is None else latest.step, bool(self.resume) or restarted])
        if step is None:
            return None
        if not resume:
            raise TrainError.single(
                f"a run was saved here already, at step {step}",
                where=str(self.out),
                fix="resume it (resume=True), or choose another folder (init= takes a run's weights there)",
            )
        return next((saved for saved in checkpoints.all() if saved.step == step), None)
