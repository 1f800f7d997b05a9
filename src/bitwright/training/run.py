"""One training run, from the first step or a checkpoint to the end."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import cached_property, partial
from itertools import islice
from logging import getLogger
from math import ceil, isfinite, isnan
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bitwright.backends import Choices
from bitwright.backends.precisions import Precision, word
from bitwright.core import __version__
from bitwright.core.errors import TrainDiverged, TrainError
from bitwright.core.interrupts import Interrupted, Stop
from bitwright.core.tensor_tree import eval_mode, map_tensors
from bitwright.deployment.checkpoint import checkpoint_file, load_checkpoint
from bitwright.plan import Plan
from bitwright.quantizers.compiled import for_this_cpu
from bitwright.quantizers.site_statistics import SiteRow, site_rows
from bitwright.training.adaptive import Adaptation, Planned, Replanner, samples_per_step
from bitwright.training.callbacks import Callback
from bitwright.training.checkpoints import (
    Checkpoints,
    SavedCheckpoint,
    checkpoint_writer,
    restore,
    validate_checkpoint,
)
from bitwright.training.config import TrainConfig
from bitwright.training.data import IterationData, TrainingData, seed_all
from bitwright.training.distributed import Ranks, Replicated, Sharded, SingleProcess, share_buffers
from bitwright.training.low_precision import LowPrecision, batch_size_of, device_kind_of
from bitwright.training.optimizer import learning_rate_factor, make_optimizer
from bitwright.training.qat import Qat
from bitwright.training.step import (
    DevicePlacement,
    Ema,
    LossMean,
    MeasuredStep,
    MicroBatch,
    TrainingObjective,
    TrainingStep,
)
from bitwright.workload import Workload, batches, can_measure, evaluate, report_data_errors

log = getLogger("bitwright.training")
progress_log = getLogger("bitwright.progress")
_CALIBRATION_BATCHES = 8  # number of training batches used if the workload has no calibration data


class TrainingRun:
    """The state and the loop of a training run. `Trainer.fit` creates it; callbacks receive it."""

    def __init__(
        self,
        *,
        workload: Workload,
        config: TrainConfig,
        ranks: Ranks,
        precision: Precision | None,
        backend: str | None,
        choices: Choices,
        out: Path | None,
        init: Path | None,
        device: torch.device,
        callbacks: Sequence[Callback],
        resume: SavedCheckpoint | None,
        stop: Stop,
        compute: Plan | None = None,
        kinds: str | None = None,
        simulate: bool = False,
        adaptive: Replanner | None = None,
    ) -> None:
        self.workload = workload
        self.where = f"workload {workload.name!r}"
        self.config = config
        self.ranks = ranks
        self.device = device
        self.out = out
        self.init = init
        self.callbacks = callbacks if ranks.first else ()
        self.stop = stop
        self.precision, self.backend, self.choices = precision, backend, choices
        self.simulate = simulate
        state = resume.state() if resume is not None else None
        self.adaptation: Adaptation | None = None
        if adaptive is not None:
            saved = None if state is None else (state.step, samples_per_step(state.identity), state.adaptive)
            self.adaptation = Adaptation.begin(adaptive, workload, config, ranks, kinds, compute, saved)
            compute, kinds = self.adaptation.planned.plan, ",".join(self.adaptation.planned.sections)
        self.compute = compute
        self.kind = None if compute is None else device_kind_of(compute, kinds, ranks)
        self.kinds: list[str | None] = ranks.gather(self.kind)
        section = None if compute is None or self.kind is None else compute.devices[self.kind]
        batch = batch_size_of(section, config.batch)
        if section is not None and section.channels_last:  # the plan was made for that layout
            self.config = config = config.model_copy(update={"channels_last": True})
        self.place = DevicePlacement(device=device, channels_last=config.channels_last)
        kind = TrainingData if config.recipe is None else partial(IterationData, config.recipe)
        self.data: TrainingData = kind(
            workload,
            batch=batch,
            seed=config.seed,
            ranks=ranks,
            workers=config.workers,
            drop_last=config.drop_last,
        )
        self.started_with = ranks.world if state is None or state.processes is None else state.processes
        if state is not None and state.batches is not None and state.identity.get("samples") == self.data.size:
            self.data.redistribute(self.data.parts, batches=state.batches)  # the run may have begun on other ranks
        self.steps_per_epoch = self.data.steps(config.accumulate)
        if self.data.batches < config.accumulate:
            raise TrainError.single(
                "an epoch has fewer batches than one step accumulates",
                where="accumulate",
                value=f"{config.accumulate} of {self.data.batches}",
                fix=f"use at most {self.data.batches}",
                code="accumulate-too-large",
            )
        if isinstance(self.data, IterationData):
            self.steps = self.data.iterations
            self.epochs = ceil(self.steps / self.steps_per_epoch)  # the last one may be shorter
        else:
            self.epochs = config.epochs
            self.steps = self.epochs * self.steps_per_epoch
        self.epoch = self.step = self.stale = 0
        self.loss: float | None = None
        self.metrics: list[dict[str, float]] = []
        self.best: dict[str, float] | None = None
        self.stopped_early = False
        self.notes: list[str] = []
        keeps = config.recipe is not None and config.recipe.keep_checkpoints
        self.checkpoints = Checkpoints(out, keep_all=keeps) if out is not None else None
        self._losses = LossMean()
        if resume is not None and state is not None:
            validate_checkpoint(self, resume, state)
        self._set_up(backend, choices, init, resume)
        if resume is not None and state is not None:
            restore(self, resume, state)

    # -- set-up: quantizers, then DDP, then optimizer and compiler -----------------------------------------

    def _set_up(self, backend: str | None, choices: Choices, init: Path | None, resume: SavedCheckpoint | None) -> None:
        config, model = self.config, self.workload.model
        self.model = self.place.model(model)
        if init is not None:
            load_checkpoint(model, checkpoint_file(init))
        seed_all(config.seed, "start")
        self.objective = TrainingObjective(self.workload, config, copy.deepcopy(model) if config.distill > 0 else None)
        self.qat: Qat | None = None
        self.whole_model: nn.Module | None = None
        if self.precision is not None:
            self.qat = self._quantize(backend, choices, resume)
            for note in self.qat.notes:
                self.note(note)
        self.low: LowPrecision | None = None
        if self.compute is not None:
            self.low = LowPrecision(self.model, self.compute, self.kind, self._example(), simulate=self.simulate)
            for note in dict.fromkeys(note for notes in self.ranks.gather(self.low.notes) for note in notes):
                self.note(note)  # one line per kind of device, not only for rank 0
        if resume is not None:  # before parameters are referenced, because loading changes the shape of scales
            load_checkpoint(model, resume.folder / "model.safetensors")
        self.parallel = self._share()
        self.ema = Ema(model, config.ema) if config.ema is not None else None
        self.optimizer = make_optimizer(model, config)
        self.training_step = (TrainingStep if self.adaptation is None else MeasuredStep)(
            self.parallel,
            self.objective,
            self.optimizer,
            amp=config.amp,
            clip=config.clip,
            device=self.device.type,
            where=self.where,
        )
        if config.compile:
            for name in [] if self.low is None else self.low.uncompiled:
                self.note(f"operators in {name} aren't compiled with the model; compilation wouldn't speed them up")
            self.training_step.net = torch.compile(self.parallel.net, options=for_this_cpu())
        for note in [] if self.adaptation is None else self.adaptation.notes:
            self.note(note)
        doubt = self.workload.direction_note()
        if doubt is not None:
            self.note(doubt)
        self.note(self.data.describe(config.accumulate))

    def _share(self) -> SingleProcess:
        if not self.ranks.several:
            return SingleProcess(self.model)
        if self.config.parallel == "ddp":
            return Replicated.replicate(self.model, self.device)
        self.whole_model = copy.deepcopy(self.model)  # sharding in place can't be undone
        return Sharded(self.model, self.device, self.ranks)

    def release(self) -> None:
        """Release objects of the process group before leaving it."""
        self.parallel = SingleProcess(self.model)
        if isinstance(self.training_step, MeasuredStep):
            self.training_step.close()
        del self.training_step

    def _quantize(self, backend: str | None, choices: Choices, resume: SavedCheckpoint | None) -> Qat:
        assert self.precision is not None
        if resume is not None:
            plan = Plan.load(resume.folder / "plan.yaml")
            return Qat.resumed(
                self.model,
                plan,
                self._example(),
                freeze_observers=self.config.freeze_observers,
                freeze_bn=self.config.freeze_bn,
                fuse=self.config.fuse,
            )
        return Qat(
            self.model,
            (self.place(batch) for batch in self._calibration()),
            precision=self.precision,
            backend=backend,
            example=self._example(),
            name=self.workload.name,
            freeze_observers=self.config.freeze_observers,
            freeze_bn=self.config.freeze_bn,
            fuse=self.config.fuse,
            **choices,
        )

    def _example(self) -> Any:
        return self.place(self.workload.inputs)

    def _calibration(self) -> Iterator[Any]:
        """This rank's calibration batches; training batches if the workload has none."""
        if self.workload.calibration is not None:
            yield from islice(batches(self.workload.calibration), self.ranks.rank, None, self.ranks.world)
            return
        self.note(f"the workload has no calibration data: ranges start from {_CALIBRATION_BATCHES} training batches")
        for inputs, _ in islice(self.data.epoch(0), _CALIBRATION_BATCHES):
            yield inputs

    def note(self, text: str) -> None:
        """Log an automatic decision and keep it for the report."""
        self.notes.append(text)
        if self.ranks.first:
            log.info(text)

    # -- the loop ------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Run all epochs that are left."""
        while self.epoch < self.epochs and not self.stopped_early:
            self._train_epoch()
            self._finish_epoch()

    @contextmanager
    def reported(self) -> Iterator[None]:
        """Tell callbacks about the start and the end of the run within this block."""
        try:
            for callback in self.callbacks:
                callback.on_start(self)
            yield
        except BaseException as error:
            with suppress(Exception):  # the first error counts
                self._end()
            if not isinstance(error, TrainDiverged):  # the logs show how the loss diverged
                self._discard()
            raise
        self._end()

    def _end(self) -> None:
        with ExitStack() as stack:
            for callback in reversed(self.callbacks):
                stack.callback(callback.on_end, self)

    def _discard(self) -> None:
        """Remove the logs of a run that has no checkpoint to resume from."""
        if self.checkpoints is None or self.checkpoints.latest() is not None:
            return
        for callback in self.callbacks:
            callback.discard(self)
        if self.ranks.first:
            self.checkpoints.remove_empty()

    def _train_epoch(self) -> None:
        self.model.train()
        first = self.epoch * self.steps_per_epoch
        data = self.data.epoch(self.epoch, skip=(self.step - first) * self.config.accumulate)
        end = min((self.epoch + 1) * self.steps_per_epoch, self.steps)
        for _ in range(self.step, end):
            self._train_step(data)
            progress_log.debug("step %d finished", self.step)
            last = self.step == end
            if self.step % self.config.log_steps == 0 or last:
                self._log()
            for callback in self.callbacks:
                callback.on_step(self)
            switched = self.adaptation is not None and self.adaptation.after_step(self)
            if last:
                break  # `_finish_epoch` saves a checkpoint with metrics
            if switched:
                data = self.data.epoch(self.epoch, skip=(self.step - first) * self.config.accumulate)
            if self.config.save_steps is not None and self.step % self.config.save_steps == 0:
                self.save()
            self._stop_if_requested()

    def _train_step(self, data: Iterator[tuple[Any, Any]]) -> None:
        recipe = self.config.recipe
        if recipe is None:
            factor = learning_rate_factor(self.config, self.step, self.steps_per_epoch)
        else:
            factor = recipe.schedule.rate(self.step + 1, self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * factor
        numbers = self.data.numbers(self.step - self.epoch * self.steps_per_epoch, self.config.accumulate)
        loss, norm = self.training_step.run(self._micro_batches(data, numbers), len(numbers))
        self.step += 1
        self._losses.add(loss, norm)
        if self.qat is not None:
            try:
                self.qat.after_step()
            except TrainDiverged:
                self._log()  # a loss that isn't finite says more than a scale
                raise
        if self.ema is not None:
            self.ema.update(self.model, self.step)

    def _micro_batches(self, data: Iterator[tuple[Any, Any]], numbers: range) -> Iterator[MicroBatch]:
        for part, number in enumerate(numbers):
            inputs, target = (self.place(value) for value in next(data))
            seed_all(self.config.seed, "step", self.step, part, self.ranks.rank)
            weight = self.data.weight(number, numbers)
            if self.objective.sums and weight:  # a sum already counts samples; DDP divides by the number of ranks
                weight = self.ranks.world / self.started_with / self.config.accumulate
            yield inputs, target, weight

    def switch(self, planned: Planned) -> None:
        """Continue with another plan: other kernels and other parts of the same global batches."""
        self.compute = planned.plan
        self.kinds = list(planned.sections)
        before, self.kind = self.low, self.kinds[self.ranks.rank]
        self.data.redistribute(list(planned.batches))
        if before is not None:
            before.finish()
        self.low = LowPrecision(self.model, self.compute, self.kind, self._example(), simulate=self.simulate)
        for callback in self.callbacks:
            callback.on_switch(self, planned)

    def _log(self) -> None:
        """Log the mean loss since the last call, over all ranks; stop the run if it isn't finite."""
        means = self._losses.read(self.ranks)
        if not means:
            return
        self.loss = means["loss"]
        if not isfinite(self.loss):
            saved = self.checkpoints.latest() if self.checkpoints is not None else None
            raise TrainDiverged.single(
                "the loss is not finite",
                where=f"step {self.step}",
                value=self.loss,
                fix="lower the learning rate, clip gradients (clip), or use warm-up"
                + (f"; {saved.folder.name} is the last valid checkpoint" if saved is not None else ""),
                code="loss-not-finite",
            )
        values = {"loss": self.loss, "lr": self.optimizer.param_groups[0]["lr"], **means}
        for callback in self.callbacks:
            callback.on_log(self, values)

    def _finish_epoch(self) -> None:
        self.epoch += 1
        self.ranks.agree(self.model)
        if self.ranks.several:  # ranks have their own norm statistics until here, and folded weights depend on them
            share_buffers(self.model)
        if self.qat is not None:
            self.qat.after_epoch()
            self.ranks.agree(self.model)
        better = self._measure()
        for callback in self.callbacks:
            callback.on_epoch(self, self.metrics[-1])
        patience = self.config.patience
        self.stale = 0 if better else self.stale + 1
        if patience is not None and self.stale >= patience:
            self.stopped_early = True
        self.save(best=better)
        if self.epoch < self.epochs and not self.stopped_early:
            self._stop_if_requested()

    def _measure(self) -> bool:
        """Compute the workload's metrics on rank 0 and send them to all; returns whether they are the best so far."""
        values: dict[str, float] = {}
        if can_measure(self.workload) and (self.ranks.first or self.parallel.evaluates_together):
            with self.ema.applied(self.model) if self.ema is not None else nullcontext():
                if self.ema is not None and self.qat is not None:
                    self.qat.settle(alone=True)  # buffers are already synchronized
                values = evaluate(self.workload, self.predict)
        values = self.ranks.tell(values)
        self.metrics.append(values)
        score = values.get(self.workload.metric)
        if score is None:
            return True
        before = None if self.best is None else self.best[self.workload.metric]
        if before is not None and not isnan(before):
            better = score < before if self.workload.less_is_better() else score > before
            if not better:
                return False
        self.best = {**values, "epoch": float(self.epoch)}
        return True

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model in evaluation mode on the run's device, with inputs and outputs on the CPU."""
        with eval_mode(self.model), torch.no_grad(), nullcontext() if self.low is None else self.low.float():
            args, kwargs = self.place((args, kwargs))
            return map_tensors(self.model(*args, **kwargs), lambda t: t.to("cpu"))

    def _stop_if_requested(self) -> None:
        if not self.parallel.stopping(self.stop.asked is not None):
            return
        by = f" by {self.stop.asked}" if self.stop.asked else ""
        words = f"interrupted{by} after step {self.step} of {self.steps}"
        self.stop.raised = True
        if self.checkpoints is None:
            raise Interrupted(words, "the run isn't saved, because it has no output folder")
        self.save()
        self.ranks.tell(None)  # torchrun ends all ranks when the first one exits, so wait until rank 0 has saved
        raise Interrupted(words, "the run is saved; rerun the command to resume (in Python: resume=True)")

    def facts(self) -> dict[str, Any]:
        """The settings and results of the run."""
        return {
            "bitwright": __version__,
            "torch": torch.__version__,
            "workload": self.workload.name,
            "quantize": word(self.precision),
            "compute": word(self.compute),
            "kind": self.kind,
            "simulate": self.simulate,
            "batches": self.data.parts,
            "init": str(self.init) if self.init is not None else None,
            "backend": self.qat.quantized.backend if self.qat is not None else None,
            "processes": self.ranks.world,
            "config": self.config.settings(),
            "config_hash": self.config.digest,
            "steps": self.step,
            "epochs": self.epoch,
            "stopped_early": self.stopped_early,
            "metric": self.workload.metric,
            "metrics": self.metrics,
            "best": self.best,
            "notes": self.notes,
            **({} if self.adaptation is None else {"adaptive": self.adaptation.facts()}),
        }

    def sites(self) -> tuple[SiteRow, ...]:
        """Scales, ranges and clipped shares per site, measured on one batch; empty for a float run."""
        if self.qat is None:
            return ()
        with report_data_errors("training", self._probe, where=self.where):
            return site_rows(self.model, [self._probe])

    @cached_property
    def _probe(self) -> Any:
        """A fixed training batch to measure sites with."""
        return self.place(next(iter(self.data.epoch(0)))[0])

    def save(self, *, best: bool = False) -> None:
        """Write a checkpoint on rank 0."""
        self._log()
        if self.checkpoints is None:
            return
        write = checkpoint_writer(self)
        if self.ranks.first:
            self.checkpoints.save(self.step, write, best=best)
            progress_log.debug("checkpoint at step %d", self.step)
