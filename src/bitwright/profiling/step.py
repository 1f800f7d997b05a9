"""One training step as the trainer runs it. The profiler measures it and predictions are compared with it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from bitwright.core.allocator import keep_freed_memory
from bitwright.core.arguments import strict
from bitwright.profiling.execution import AMP_DTYPES, Amp
from bitwright.workload import Loss, call_on, trainable_parameters

Clock = Literal["wall", "cpu"]
#: `cpu` counts what this thread computes, and not what others on the same machine do meanwhile: for one thread only.
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.thread_time}
Batch = tuple[Any, Any]
_SETTLED = 0.01  # seconds of steps after which caches hold what steps leave in them
PHASES = ("forward", "loss", "backward", "clip", "optimizer", "other")


@strict
class StepSettings(BaseModel):
    """What makes up a step beside the model and the plan; the words are those of the trainer's settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    optimizer: Literal["sgd", "adamw"] = Field(default="sgd", description="SGD has Nesterov momentum.")
    foreach: bool | None = Field(default=None, description="The optimizer's own switch; torch decides if not given.")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="SGD's momentum, or AdamW's first beta.")
    clip: float | None = Field(default=None, gt=0, le=1e30, description="Largest norm of all gradients together.")
    accumulate: int = Field(default=1, ge=1, le=10**6, description="Batches whose gradients make one step.")
    amp: Amp | None = Field(default=None, description="Autocast; fp16 with loss scaling.")
    schedule: bool = Field(default=True, description="Whether the learning rate changes at each step.")
    bucket_cap_mb: float | None = Field(
        default=None, gt=0, description="DDP's bucket size; its own default if not given."
    )
    fuse: bool = Field(default=True, description="The quantizers' arithmetic runs compiled.")

    @property
    def uses_foreach(self) -> bool:
        """Whether the optimizer works on all tensors at once: on CPUs, where it is measured, not unless it is told to.

        Profiles of GPUs come from traces and data sheets, and have one figure under both names.
        """
        return bool(self.foreach)

    def autocast(self, device: str = "cpu") -> AbstractContextManager[Any]:
        """The context of forward and loss."""
        if self.amp is None:
            return nullcontext()
        return torch.autocast(device, dtype=getattr(torch, AMP_DTYPES[self.amp]))


def make_optimizer(parameters: Sequence[nn.Parameter], settings: StepSettings) -> torch.optim.Optimizer:
    """As the trainer's, with a learning rate that moves nothing far."""
    lr = 1e-6
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=lr, betas=(settings.momentum, 0.999), foreach=settings.foreach)
    nesterov = settings.momentum > 0
    return torch.optim.SGD(
        parameters, lr=lr, momentum=settings.momentum, nesterov=nesterov, weight_decay=1e-4, foreach=settings.foreach
    )


class TrainingStep:
    """Runs steps of a model on given batches; each call is one step and gives the seconds of its phases."""

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
        keep_freed_memory()  # as a trainer's process does
        self.model = model
        self.net: Any = model if net is None else net
        self.batches = list(batches)
        self.loss = loss
        self.settings = settings
        self.clock = CLOCKS[clock]
        self.parameters = trainable_parameters(model)
        self.optimizer = make_optimizer(self.parameters, settings)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0 / (1 + step))
        self.scaler: Any = torch.amp.GradScaler("cpu", enabled=settings.amp == "fp16")

    def __call__(self) -> dict[str, float]:
        """One step."""
        clock, settings = self.clock, self.settings
        spent = dict.fromkeys(PHASES, 0.0)
        start = clock()
        self.optimizer.zero_grad(set_to_none=True)
        for part in range(settings.accumulate):
            inputs, target = self.batches[part % len(self.batches)]
            last = part == settings.accumulate - 1
            syncs: AbstractContextManager[Any] = nullcontext()
            if not last and self.net is not self.model:
                syncs = self.net.no_sync()  # DDP's own way not to communicate
            with syncs:
                with settings.autocast():
                    t0 = clock()
                    output = self.run_forward(inputs)
                    t1 = clock()
                    loss = self.run_loss(output, target)
                    t2 = clock()
                share = loss / settings.accumulate if settings.accumulate > 1 else loss
                scaled: Tensor = self.scaler.scale(share)
                self.run_backward(scaled)
                t3 = clock()
            del output, loss, share, scaled
            spent["forward"] += t1 - t0
            spent["loss"] += t2 - t1
            spent["backward"] += t3 - t2
        t4 = clock()
        if settings.clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.parameters, settings.clip)
        t5 = clock()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        t6 = clock()
        if settings.schedule:
            self.scheduler.step()
        end = clock()
        spent["clip"], spent["optimizer"] = t5 - t4, t6 - t5
        spent["other"] = end - start - sum(spent.values())
        return spent

    def settled(self) -> dict[str, float]:
        """A step that follows some of its own, as a trainer's do, whatever ran before: short ones follow more."""
        spent, steps = 0.0, 0
        while steps < 1 or (spent < _SETTLED and steps < 20):
            spent += sum(self().values())
            steps += 1
        return self()

    # What a watcher wants to stand around.

    def run_forward(self, inputs: Any) -> Any:
        """The model's forward."""
        return call_on("training", self.net, inputs)

    def run_loss(self, output: Any, target: Any) -> Tensor:
        """The loss."""
        return self.loss(output, target)

    def run_backward(self, loss: Tensor) -> None:
        """The backward."""
        loss.backward()
