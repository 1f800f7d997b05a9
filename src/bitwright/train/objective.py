"""The loss of a step: the workload's own, smoothed or partly taught by the float model if asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitwright.errors import TrainError
from bitwright.modes import evaluating
from bitwright.train.config import TrainConfig
from bitwright.workload import Workload, call, loss_of

Loss = Callable[[Any, Any], Tensor]


class Objective:
    """loss = (1 − d)·task + d·T²·KL(teacher/T ‖ student/T)."""

    def __init__(self, workload: Workload, config: TrainConfig, teacher: nn.Module | None) -> None:
        task = _task(workload, config.label_smoothing)
        self.task = loss_of(replace(workload, loss=task))
        self.share = config.distill
        self.temperature = config.temperature
        self.teacher = teacher
        self.sums = teacher is None and _reduction(task) == "sum"
        """Whether the loss is a sum over samples, not their mean, as far as can be seen."""
        if teacher is not None:
            teacher.requires_grad_(False)

    def __call__(self, output: Any, inputs: Any, target: Any) -> Tensor:
        """The loss of one batch."""
        loss = self.task(output, target)
        if self.teacher is None:
            return loss
        with torch.no_grad(), evaluating(self.teacher):
            taught = _logits(call(self.teacher, inputs))
        heat = self.temperature
        student, teacher = (F.log_softmax(x.float() / heat, dim=-1) for x in (_logits(output), taught))
        distance = F.kl_div(student, teacher, log_target=True, reduction="batchmean") * heat**2
        return (1 - self.share) * loss + self.share * distance


def _reduction(loss: Loss) -> object:
    """Of a loss module, or of a function with its reduction fixed; others are taken as means."""
    return loss.keywords.get("reduction") if isinstance(loss, partial) else getattr(loss, "reduction", None)


def _logits(output: Any) -> Tensor:
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        raise TrainError.single(
            "distillation needs logits", value=type(output).__name__, fix="return a tensor, or an object with .logits"
        )
    return logits


def _task(workload: Workload, smoothing: float) -> Loss:
    loss = workload.loss
    assert loss is not None  # the trainer has refused it before
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
        "labels are smoothed within cross entropy only",
        where="label_smoothing",
        value=smoothing,
        fix="smooth in the workload's own loss, or use F.cross_entropy",
    )
