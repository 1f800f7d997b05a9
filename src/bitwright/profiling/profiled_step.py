"""Training steps that the profiler runs: the timed step, model variants, and the step of a workload."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from bitwright.backends import make_plan
from bitwright.backends.precisions import KERNEL_PRECISIONS, kernel_precision, resolve
from bitwright.core import tensor_tree as tree
from bitwright.core.arguments import strict
from bitwright.core.environment import keep_freed_memory
from bitwright.core.errors import BitwrightError
from bitwright.graph import capture
from bitwright.plan import Plan
from bitwright.profiling.step_graph import StepGraph, record_step
from bitwright.quantizers import find_attachment, prepare
from bitwright.sensitivity import spec_of
from bitwright.training.config import StepSettings
from bitwright.training.data import TrainingData
from bitwright.training.distributed import Ranks, Replicated, SingleProcess
from bitwright.training.optimizer import build_optimizer
from bitwright.training.qat import Qat
from bitwright.training.step import Batch, TrainingStep
from bitwright.workload import Loss, Workload, loss_of, trainable_parameters

if TYPE_CHECKING:
    from bitwright.profiling.step_timer import StepTimer

Clock = Literal["wall", "cpu"]
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.thread_time}
"""`cpu` is the CPU time of this thread. It excludes other processes, and works for one thread only."""
PHASES = ("forward", "loss", "backward", "clip", "optimizer", "other")
_SETTLED = 0.01  # seconds of steps after which the caches hold what a step leaves in them


def make_optimizer(parameters: Sequence[nn.Parameter], settings: StepSettings) -> torch.optim.Optimizer:
    """The trainer's optimizer, with a learning rate that hardly changes the weights."""
    return build_optimizer(
        settings.optimizer,
        parameters,
        lr=1e-6,
        momentum=settings.momentum,
        weight_decay=1e-4,
        foreach=settings.foreach,
    )


class TimedStep(TrainingStep):
    """The trainer's step on given batches. Each call runs one step and returns the seconds of its phases.

    `net` is a DDP wrapper of the model. A `StepTimer` can observe the operators of a step.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Batch],
        loss: Loss,
        settings: StepSettings,
        *,
        clock: Clock = "wall",
        net: Any = None,
    ) -> None:
        keep_freed_memory()  # as the trainer does
        self.model = model
        self.batches = list(batches)
        self.settings = settings
        self.task = loss
        self.clock = CLOCKS[clock]
        self.timer: StepTimer | None = None
        self.spent: dict[str, float] = {}
        self.since = 0.0
        super().__init__(
            SingleProcess(model) if net is None else Replicated(model, net),
            lambda output, _, target: loss(output, target),
            make_optimizer(trainable_parameters(model), settings),
            amp=settings.amp,
            clip=settings.clip,
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0 / (1 + step))

    def __call__(self) -> dict[str, float]:
        """Run one step."""
        self.spent = dict.fromkeys(PHASES, 0.0)
        self.since = self.clock()
        count = self.settings.accumulate
        self.run(((*self.batches[part % len(self.batches)], 1 / count) for part in range(count)), count)
        if self.settings.schedule:
            self.scheduler.step()
        self.end_phase("other")
        return self.spent

    def end_phase(self, phase: str) -> None:
        """Add the time since the previous call to this phase."""
        now = self.clock()
        self.spent[phase] += now - self.since
        self.since = now

    def settled(self) -> dict[str, float]:
        """Run a step after other steps of the same model, as in training. A short step runs after several others."""
        spent, steps = 0.0, 0
        while steps < 1 or (spent < _SETTLED and steps < 20):
            spent += sum(self().values())
            steps += 1
        return self()

    def run_loss(self, output: Any, inputs: Any, target: Any) -> Tensor:
        """The loss, which a timer observes as an operator."""
        if self.timer is None:
            return super().run_loss(output, inputs, target)
        return self.timer.loss(lambda: self.task(output, target), self.task, output, target)

    def run_backward(self, loss: Tensor) -> None:
        """The backward pass, whose nodes a timer observes."""
        if self.timer is None:
            return super().run_backward(loss)
        return self.timer.backward(loss.backward)


@strict
@dataclass(frozen=True, kw_only=True)
class Variant:
    """A model that is ready to train under one plan: in float, or prepared and calibrated."""

    model: nn.Module
    plan: Plan = field(default_factory=Plan)
    settings: StepSettings = field(default_factory=StepSettings)

    def __post_init__(self) -> None:
        """Raise if the model isn't prepared for the plan."""
        if bool(find_attachment(self.model)) != self.plan.changes_models:
            raise BitwrightError(
                "the model isn't prepared for the plan",
                fix="prepare(model, plan) and calibrate it, or pass a Plan()",
                code="not-prepared",
            )


def halves(plan: Plan) -> list[Plan]:
    """Divide a resolved plan into two plans: every second operator, and the others. None for a single operator."""
    names = [name for name, spec in plan.compute.items() if spec.is_low_precision]
    names += list(dict.fromkeys(site.rpartition(":")[0] for site, _ in plan.quantized))
    chosen = (set(names[0::2]), set(names[1::2]))
    return [restricted(plan, own) for own in chosen if own and len(own) < len(names)]


def restricted(plan: Plan, operators: set[str]) -> Plan:
    """Restrict the plan to these operators. A quantizer that depends on one of another operator is left out."""
    sites = {
        site: spec
        for site, spec in plan.sites.items()
        if site.rpartition(":")[0] in operators and (spec.share is None or spec.share.rpartition(":")[0] in operators)
    }
    whole = {s: spec for s, spec in sites.items() if all(o in sites for o in spec.quantizer_options.get("of", []))}
    folds = {norm: fold for norm, fold in plan.fold.items() if plan.folds[norm].into in operators}
    compute = {name: spec for name, spec in plan.compute.items() if name in operators}
    return replace(plan, sites=whole, fold=folds, compute=compute)


@dataclass(frozen=True, kw_only=True)
class WorkloadStep:
    """The training step of a workload: its first batch and its loss.

    >>> from bitwright import load_workload
    >>> step = WorkloadStep.of(load_workload("digits-untrained"), 8)
    >>> step.record().samples, step.record_half().samples
    (8, 4)
    """

    workload: Workload
    batch: Batch
    loss: Loss

    @staticmethod
    def of(workload: Workload, size: int | None = None, *, channels_last: bool = False) -> WorkloadStep:
        """Load the first batch: `size` samples, by default as many as the workload's loader has, or 64.

        With `channels_last`, convert the model and the batch to NHWC.
        """
        if workload.training is None or workload.loss is None:
            missing = "training" if workload.training is None else "loss"
            raise BitwrightError(
                f"a training step needs the workload's {missing}",
                where=f"workload {workload.name!r}",
                fix=f"pass Workload({missing}=…)",
                code="workload-field-missing",
            )
        data = TrainingData(workload, batch=size, seed=0, ranks=Ranks(rank=0, world=1, local=0), workers=0)
        batch = next(data.epoch(0))
        if channels_last:
            workload.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            batch = tree.channels_last(batch)
        return WorkloadStep(workload=workload, batch=batch, loss=loss_of(workload))

    @property
    def half(self) -> Batch:
        """The first half of the batch, at least one sample."""
        half: Batch = tree.slice_batch(self.batch, 0, max(1, tree.batch_size(self.batch) // 2))
        return half

    def record(self) -> StepGraph:
        """Record one step of the float model. The model is left unchanged."""
        return record_step(self.workload.model, self.batch, self.loss, name=self.workload.name)

    def record_half(self) -> StepGraph:
        """Record one step with half of the batch."""
        return record_step(self.workload.model, self.half, self.loss, name=self.workload.name)

    def variant(self, plan: Plan | None, settings: StepSettings) -> Variant:
        """Return a copy of the model that is prepared and calibrated for training under a plan."""
        model = copy.deepcopy(self.workload.model)
        if plan is not None and any(spec.is_low_precision for spec in plan.compute.values()):
            prepare(model, plan, inputs=self.workload.inputs)
            return Variant(model=model, plan=plan, settings=settings)
        if plan is None or not any(True for _ in plan.quantized):
            return Variant(model=model, settings=settings)
        Qat(model, [self.batch[0]], precision=plan, example=self.workload.inputs, fuse=settings.fuse)
        return Variant(model=model, plan=plan, settings=settings)


def resolve_plan(workload: Workload, plan: Plan | str | Path) -> Plan:
    """Return the plan for a precision name (`int8`, `w4a8`), a plan file or a `Plan`, with its patterns resolved."""
    precision = plan if isinstance(plan, Plan) else str(plan)
    graph = capture(workload.model, workload.inputs)
    if isinstance(precision, str) and precision in KERNEL_PRECISIONS:
        return kernel_precision(str(precision), graph, model=workload.name)
    found, target, choices, _ = resolve(precision, None, {})
    if found is None:
        return make_plan(graph, target, model=workload.name, **choices)
    return found.resolve(graph)


def kernel_plan(workload: Workload, format: str) -> Plan:
    """Return a plan that runs every operator with one kernel: `int8`, `int8/stochastic/weight`, `bf16`."""
    graph = capture(workload.model, workload.inputs)
    return Plan(compute={"*": spec_of(format)}).resolve(graph)
