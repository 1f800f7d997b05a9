"""The training step: forward, loss, backward, clipping and the optimizer. The profiler measures the same step.

This module also contains the loss, the device placement and the averaged weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from bitwright.core.errors import TrainError
from bitwright.core.tensor_tree import eval_mode, map_tensors
from bitwright.training.config import AMP_DTYPES, Amp, TrainConfig
from bitwright.training.distributed import Ranks, SingleProcess
from bitwright.workload import Loss, Workload, call, call_on, loss_of

Batch = tuple[Any, Any]
"""Inputs and target."""
MicroBatch = tuple[Any, Any, float]
"""Inputs, target, and the weight of the batch's loss in the loss of the step."""


class TrainingStep:
    """One training step, with gradients of one or several batches. A subclass can observe its phases.

    `net` is what is called: the model, or its wrapper (DDP, compiled). `loss` takes the output, the inputs and the
    target. Under `amp="fp16"` the loss is scaled.
    """

    def __init__(
        self,
        parallel: SingleProcess,
        loss: Callable[[Any, Any, Any], Tensor],
        optimizer: torch.optim.Optimizer,
        *,
        net: Any = None,
        amp: Amp | None = None,
        clip: float | None = None,
        device: str = "cpu",
        where: str | None = None,
    ) -> None:
        self.parallel = parallel
        self.net: Any = parallel.net if net is None else net
        self.loss = loss
        self.optimizer = optimizer
        self.scaler: Any = torch.amp.GradScaler(device, enabled=amp == "fp16")
        self.amp, self.clip, self.device, self.where = amp, clip, device, where

    def run(self, batches: Iterable[MicroBatch], count: int) -> tuple[Tensor, Tensor | None]:
        """Run one step on `count` batches. Return the loss, and the norm of the gradients if they are clipped."""
        self.optimizer.zero_grad(set_to_none=True)
        self.parallel.begin_step()
        total: Tensor | None = None
        for number, (inputs, target, weight) in enumerate(batches, 1):
            with self.parallel.accumulating(number == count):
                with autocast(self.amp, self.device):
                    self.end_phase("other")
                    loss = self.run_loss(self.run_forward(inputs), inputs, target)
                    self.end_phase("loss")
                self.run_backward(self.scaler.scale(loss if weight == 1 else loss * weight))
                self.end_phase("backward")
            part = loss.detach().float()
            part = part if weight == 1 else part * weight
            total = part if total is None else total + part
            del loss
        assert total is not None, "a step has at least one batch"
        self.parallel.end_backward()
        norm = None
        if self.clip is not None:
            self.end_phase("other")
            self.scaler.unscale_(self.optimizer)
            norm = self.parallel.clip(self.clip)
            self.end_phase("clip")
        self.end_phase("other")
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.end_phase("optimizer")
        return total, norm

    def end_phase(self, phase: str) -> None:
        """The time since the previous call belongs to this phase; the profiler reads the clock here."""

    def run_forward(self, inputs: Any) -> Any:
        """The forward pass."""
        output = call_on("training", self.net, inputs, where=self.where)
        self.end_phase("forward")
        return output

    def run_loss(self, output: Any, inputs: Any, target: Any) -> Tensor:
        """The loss of one batch."""
        return self.loss(output, inputs, target)

    def run_backward(self, loss: Tensor) -> None:
        """The backward pass."""
        loss.backward()


PHASES = ("other", "forward", "loss", "backward", "clip", "optimizer")
_SETTLING = 2  # steps after a start or a switch that aren't measured


class MeasuredStep(TrainingStep):
    """A training step that records what this rank computes, and how long it waits for other ranks.

    DDP waits at two places: before the forward pass, for the buffers of rank 0, and after the last gradient, for the
    last all-reduce. A hook before the model's forward and one on the parameter with the last gradient mark both.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rows: list[list[float]] = []
        """own seconds, wait after backward, seconds since the start of the previous step, and seconds of each phase."""
        self.skipped = 0
        self._spent = dict.fromkeys(PHASES, 0.0)
        self._since = self._entered = self._waited = self._last_wait = 0.0
        self._begun: float | None = None
        self._done = 0.0
        """The time of the last gradient; 0 without one."""
        self._last: Tensor | None = None
        self._hooks: list[Any] = []
        self._enter = self.parallel.model.register_forward_pre_hook(self._forward_begins)
        self._watch_all()

    def run(self, batches: Iterable[MicroBatch], count: int) -> tuple[Tensor, Tensor | None]:
        """Run one step and record it."""
        self._spent = dict.fromkeys(PHASES, 0.0)
        self._waited, self._last_wait, begun = 0.0, 0.0, time.perf_counter()
        period = 0.0 if self._begun is None else begun - self._begun
        self._begun = self._since = begun
        known = self._last is not None
        result = super().run(batches, count)
        if self.skipped < _SETTLING or not known:
            self.skipped += 1
        elif self._done:
            own = self._since - begun - self._waited
            self.rows.append([own, self._last_wait, period, *self._spent.values()])
        return result

    def settle(self) -> None:
        """Forget what was measured; the next steps aren't typical."""
        self.rows, self.skipped, self._begun = [], 0, None
        self._watch_all()

    def close(self) -> None:
        """Remove the hooks."""
        self._enter.remove()
        self._unwatch()

    def end_phase(self, phase: str) -> None:
        """Add the time since the previous call to this phase."""
        now = time.perf_counter()
        self._spent[phase] += now - self._since
        self._since = now

    def run_forward(self, inputs: Any) -> Any:
        """The forward pass; the wait before it is no work of this rank."""
        self._entered = self._since
        before = self._since
        output = super().run_forward(inputs)
        self._wait("forward", self._entered - before)
        return output

    def run_backward(self, loss: Tensor) -> None:
        """The backward pass; the wait after the last gradient is no work of this rank."""
        self._done = 0.0
        super().run_backward(loss)
        if not self._done:  # another graph than before: find its last gradient
            self._watch_all()
            return
        self._last_wait = time.perf_counter() - self._done
        self._wait("backward", self._last_wait)
        if len(self._hooks) > 1 and self._last is not None:
            self._unwatch()
            self._hooks = [self._last.register_post_accumulate_grad_hook(self._gradient_ready)]

    def _wait(self, phase: str, seconds: float) -> None:
        self._spent[phase] -= seconds
        self._waited += seconds

    def _forward_begins(self, *_: object) -> None:
        self._entered = time.perf_counter()

    def _gradient_ready(self, parameter: Tensor) -> None:
        self._done, self._last = time.perf_counter(), parameter

    def _watch_all(self) -> None:
        self._unwatch()
        self._last = None
        trained = [p for p in self.parallel.model.parameters() if p.requires_grad]
        self._hooks = [p.register_post_accumulate_grad_hook(self._gradient_ready) for p in trained]

    def _unwatch(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def autocast(amp: Amp | None, device: str = "cpu") -> AbstractContextManager[Any]:
    """The context of forward and loss."""
    return nullcontext() if amp is None else torch.autocast(device, dtype=getattr(torch, AMP_DTYPES[amp]))


class LossMean:
    """The mean loss and gradient norm of the steps since it was last read."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.norms: list[Tensor] = []

    def add(self, loss: Tensor, norm: Tensor | None) -> None:
        """Add one step."""
        self.losses.append(loss)
        if norm is not None:
            self.norms.append(norm)

    def read(self, ranks: Ranks) -> dict[str, float]:
        """Return the means over all ranks and start again; empty without steps."""
        if not self.losses:
            return {}
        mean = torch.stack(self.losses).mean()
        if ranks.several:
            dist.all_reduce(mean)
            mean /= ranks.world
        found = {"loss": float(mean)}
        if self.norms:
            found["gradient_norm"] = float(torch.stack(self.norms).mean())
        self.losses, self.norms = [], []
        return found


class TrainingObjective:
    """loss = (1 − d)·task + d·T²·KL(teacher/T ‖ student/T)."""

    def __init__(self, workload: Workload, config: TrainConfig, teacher: nn.Module | None) -> None:
        task = _task(workload, config.label_smoothing)
        self.task = loss_of(replace(workload, loss=task))
        self.share = config.distill
        self.temperature = config.temperature
        self.teacher = teacher
        self.sums = teacher is None and _reduction(task) == "sum"
        """Whether the loss is known to be a sum over samples instead of a mean."""
        if teacher is not None:
            teacher.requires_grad_(False)

    def __call__(self, output: Any, inputs: Any, target: Any) -> Tensor:
        """The loss of one batch."""
        loss = self.task(output, target)
        if self.teacher is None:
            return loss
        with torch.no_grad(), eval_mode(self.teacher):
            taught = _logits(call(self.teacher, inputs))
        heat = self.temperature
        student, teacher = (F.log_softmax(x.float() / heat, dim=-1) for x in (_logits(output), taught))
        distance = F.kl_div(student, teacher, log_target=True, reduction="batchmean") * heat**2
        return (1 - self.share) * loss + self.share * distance


def _reduction(loss: Loss) -> object:
    """The reduction of a loss module or of a partial function; other losses count as means."""
    return loss.keywords.get("reduction") if isinstance(loss, partial) else getattr(loss, "reduction", None)


def _logits(output: Any) -> Tensor:
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        raise TrainError.single(
            "distillation requires logits",
            value=type(output).__name__,
            fix="return a tensor, or an object with .logits",
            code="no-logits",
        )
    return logits


def _task(workload: Workload, smoothing: float) -> Loss:
    loss = workload.loss
    assert loss is not None  # checked by the trainer
    if smoothing == 0.0:
        return loss
    if loss is F.cross_entropy:
        return partial(F.cross_entropy, label_smoothing=smoothing)
    if isinstance(loss, nn.CrossEntropyLoss):
        return nn.CrossEntropyLoss(
            weight=loss.weight,
            ignore_index=loss.ignore_index,
            reduction=loss.reduction,
            label_smoothing=smoothing,
        )
    raise TrainError.single(
        "label smoothing requires cross entropy",
        where="label_smoothing",
        value=smoothing,
        fix="smooth in the workload's own loss, or use F.cross_entropy",
        code="smoothing-unsupported",
    )


class Ema:
    """average ← d·average + (1−d)·current after each step. d grows, so the initial weights soon lose influence."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.average: dict[str, Tensor] = {
            name: tensor.detach().clone() for name, tensor in model.state_dict().items() if tensor.is_floating_point()
        }

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Include the state after `step` (from 1)."""
        decay = min(self.decay, (1 + step) / (10 + step))
        now = model.state_dict()
        for name, average in self.average.items():
            average.lerp_(now[name], 1 - decay)

    @torch.no_grad()
    def put(self, model: nn.Module) -> None:
        """Copy the average into the model."""
        state = model.state_dict()
        for name, tensor in self.average.items():
            state[name].copy_(tensor)

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Use the average in the model temporarily."""
        state = model.state_dict()
        before = {name: state[name].detach().clone() for name in self.average}
        self.put(model)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, tensor in before.items():
                    state[name].copy_(tensor)


@dataclass(frozen=True, kw_only=True)
class DevicePlacement:
    """A device and a memory format of images."""

    device: torch.device
    channels_last: bool

    def model(self, model: nn.Module) -> nn.Module:
        """Move the module in place and return it."""
        model = model.to(self.device)
        if self.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model

    def __call__(self, value: Any) -> Any:
        """Move all tensors in a value."""
        if self.device.type == "cpu" and not self.channels_last:
            return value
        return map_tensors(value, self._tensor)

    def _tensor(self, tensor: Tensor) -> Tensor:
        tensor = tensor.to(self.device, non_blocking=True)
        if self.channels_last and tensor.dim() == 4:
            tensor = tensor.contiguous(memory_format=torch.channels_last)
        return tensor
