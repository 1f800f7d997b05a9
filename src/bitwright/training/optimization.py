"""Loss, optimizer, learning-rate schedule and averaged weights of a training step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import cos, pi
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitwright.core.errors import TrainError
from bitwright.core.modes import eval_mode
from bitwright.core.tensor_tree import map_tensors
from bitwright.training.config import TrainConfig
from bitwright.training.qat import parameter_groups
from bitwright.workload import Loss, Workload, call, loss_of, trainable_parameters


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


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """SGD or AdamW; each group stores its peak learning rate as `peak`, which the schedule multiplies."""
    trainable_parameters(model)
    groups = parameter_groups(model, weight_decay=config.weight_decay, quantizer_lr=config.quantizer_lr)
    for group in groups:
        if group["name"] == "quantizers":
            group["weight_decay"] = config.quantizer_decay
    if config.optimizer == "adamw":
        made: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(config.momentum, 0.999))
    else:
        made = torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.momentum > 0)
    for group in made.param_groups:
        group["peak"] = group["lr"]
    return made


def learning_rate_factor(config: TrainConfig, step: int, steps_per_epoch: int) -> float:
    """The learning rate at `step` (from 0), relative to its peak.

    >>> [round(learning_rate_factor(TrainConfig(epochs=2, warmup=0.5), step, 4), 3) for step in range(8)]
    [0.333, 0.667, 1.0, 0.933, 0.75, 0.5, 0.25, 0.067]
    """
    warm = round(config.warmup * steps_per_epoch)
    if step < warm:
        return (step + 1) / (warm + 1)
    if config.schedule == "constant":
        return 1.0
    total = config.epochs * steps_per_epoch
    return 0.5 * (1 + cos(pi * (step - warm) / max(total - warm, 1)))


class Ema:
    """average ← d·average + (1−d)·now after each step; d increases to its value, so the start loses its weight soon."""

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
