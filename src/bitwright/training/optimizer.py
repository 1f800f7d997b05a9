"""Optimizers, parameter groups and learning-rate schedules.

`TrainConfig` counts epochs. `Recipe` replaces these settings for trainings that count iterations, as files of other
systems do.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from bitwright.core.errors import Problem
from bitwright.core.schemas import Strict

if TYPE_CHECKING:  # the command line reads these settings for its help, without torch
    import torch
    from torch import nn

    from bitwright.training.config import TrainConfig

__all__ = [
    "GroupSettings",
    "OptimizerSettings",
    "OptimizerWatch",
    "RateSchedule",
    "Recipe",
    "build_optimizer",
    "group_by_kind",
    "learned_parameter_problems",
    "learning_rate_factor",
    "make_optimizer",
]

Share = Annotated[float, Field(ge=0, lt=1)]
Amount = Annotated[float, Field(ge=0, le=1e6)]
Iteration = Annotated[int, Field(ge=0, le=10**9)]
Kind = Literal[
    "conv_b", "linear_b", "bn_w", "bn_b", "linear_w", "conv_dw_w", "conv_dw_b", "conv_dense_w", "conv_dense_b"
]
"""Kinds of parameters: w is a weight, b a bias; dw is a depthwise convolution, dense one without groups."""
OptimizerName = Literal["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta"]
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "SGD": ("weight_decay", "momentum", "nesterov", "dampening"),
    "Adam": ("weight_decay", "betas", "eps", "amsgrad"),
    "AdamW": ("weight_decay", "betas", "eps", "amsgrad"),
    "RMSprop": ("weight_decay", "momentum", "eps"),
    "Adagrad": ("weight_decay", "eps"),
    "Adadelta": ("weight_decay", "eps"),
}
"""The options of each optimizer."""


class GroupSettings(Strict):
    """Settings of one kind of parameter that differ from those of the optimizer."""

    weight_decay: Amount | None = None
    lr: Amount | None = Field(default=None, description="The first learning rate. The schedule scales it.")
    momentum: Share | None = None


class OptimizerSettings(Strict):
    """An optimizer of torch with its options. Missing options have torch's defaults."""

    name: OptimizerName = "SGD"
    weight_decay: Amount | None = None
    momentum: Share | None = None
    nesterov: bool | None = None
    dampening: Share | None = None
    betas: tuple[Share, Share] | None = None
    eps: Amount | None = None
    amsgrad: bool | None = None

    @model_validator(mode="after")
    def _supported(self) -> OptimizerSettings:
        strange = [key for key in self.options if key not in OPTIONS[self.name]]
        if strange:
            raise ValueError(f"{self.name} has no option {', '.join(strange)}")
        if self.nesterov and (not self.momentum or self.dampening):
            raise ValueError("nesterov needs momentum, and no dampening")
        return self

    @property
    def options(self) -> dict[str, Any]:
        """The options that are set."""
        return self.model_dump(exclude={"name"}, exclude_none=True)


class RateSchedule(Strict):
    """The learning rate at each iteration: a linear warm-up from `start` to `top`, then a curve."""

    kind: Literal["Cosine", "Step", "StepDecay", "Poly", "Constant"] = "Cosine"
    start: Amount = 0.004
    top: Amount = 0.004
    last: Amount = 0.0
    warmup: Iteration = 0
    steps: tuple[Iteration, ...] = ()
    factors: tuple[Amount, ...] = ()
    every: int | None = Field(default=None, ge=1, le=10**9)
    decay: Amount | None = None
    power: Amount | None = None

    def rate(self, iteration: int, iterations: int) -> float:
        """The learning rate of an iteration, which are counted from 1.

        >>> schedule = RateSchedule(start=0.1, top=0.4, warmup=4)
        >>> [round(schedule.rate(n, 8), 3) for n in range(1, 9)]
        [0.1, 0.2, 0.3, 0.4, 0.341, 0.2, 0.059, 0.0]
        """
        if self.warmup >= 2 and iteration < self.warmup:
            return self.start + (self.top - self.start) / (self.warmup - 1) * (iteration - 1)
        done = iteration - self.warmup
        if self.kind == "Cosine":
            share = done / max(1, iterations - self.warmup)
            return self.last + (self.top - self.last) * (1 + math.cos(math.pi * share)) / 2
        if self.kind == "Step":
            changes = zip(self.steps, self.factors, strict=True)
            return self.top * math.prod(factor for start, factor in changes if iteration >= start)
        if self.kind == "StepDecay":
            return self.top * float((self.decay or 0.0) ** (done // (self.every or 1)))
        if self.kind == "Poly":
            return self.top * float(max(0.0, 1 - done / iterations) ** (self.power or 1.0))
        return self.top


class Recipe(Strict):
    """How a network trains, in iterations.

    Give `iterations` or `epochs`. The metrics are measured every `validate_every` iterations and at the end; the time
    between two measurements counts as an epoch in logs and checkpoints. `sampler` is the order of samples: a shuffle of
    as many repetitions of the data as the run needs ("iterations"), or one shuffle per pass ("epochs").
    """

    iterations: int | None = Field(default=None, ge=1, le=10**9)
    epochs: int | None = Field(default=None, ge=1, le=10**6)
    validate_every: int = Field(default=1000, ge=1, le=10**9)
    sampler: Literal["iterations", "epochs"] = "iterations"
    optimizer: OptimizerSettings = OptimizerSettings()
    groups: dict[Kind, GroupSettings] = Field(default_factory=dict)
    schedule: RateSchedule = RateSchedule()
    keep_checkpoints: bool = Field(default=False, description="Keep all checkpoints, not only the last ones.")

    @model_validator(mode="after")
    def _one_length(self) -> Recipe:
        if (self.iterations is None) == (self.epochs is None):
            raise ValueError("give either iterations or epochs")
        if "momentum" not in OPTIONS[self.optimizer.name] and any(
            own.momentum is not None for own in self.groups.values()
        ):
            raise ValueError(f"{self.optimizer.name} has no option momentum")
        return self

    def length(self, samples: int, batch: int) -> int:
        """The number of iterations with this many samples, and samples per iteration over all processes."""
        return self.iterations or (self.epochs or 1) * max(1, samples // batch)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer. The groups store the ratio of their learning rate to the schedule's first one as `peak`."""
        import torch

        first = self.schedule.rate(1, 2**53)
        groups = [
            {"params": parameters, "name": kind, **self._own(kind)}
            for kind, parameters in group_by_kind(model, tuple(self.groups)).items()
            if parameters
        ]
        made: torch.optim.Optimizer = getattr(torch.optim, self.optimizer.name)(
            groups, lr=first, **self.optimizer.options
        )
        for group in made.param_groups:
            group["peak"] = group["lr"] / first if first else 1.0
        return made

    def _own(self, kind: str) -> dict[str, float]:
        own = {str(name): settings for name, settings in self.groups.items()}.get(kind)
        return {} if own is None else own.model_dump(exclude_none=True)


def group_by_kind(model: nn.Module, kinds: tuple[str, ...] = ()) -> dict[str, list[nn.Parameter]]:
    """The parameters of a model by kind. `others` are those without a kind, such as the state of quantizers.

    Biases and batch norms always have a group. Weights have one only if their kind is in `kinds`.

    >>> from torch import nn
    >>> layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)]
    >>> {kind: len(found) for kind, found in group_by_kind(nn.Sequential(*layers)).items() if found}
    {'others': 2, 'conv_b': 1, 'linear_b': 1, 'bn_w': 1, 'bn_b': 1}
    """
    from torch import nn

    found: dict[str, list[nn.Parameter]] = {kind: [] for kind in ("others", "conv_b", "linear_b", "bn_w", "bn_b")}
    found |= {kind: [] for kind in kinds if kind not in found}
    known: set[int] = set()
    for module in model.modules():
        for parameter, suffixes in ((getattr(module, "weight", None), "w"), (getattr(module, "bias", None), "b")):
            if not isinstance(parameter, nn.Parameter) or id(parameter) in known or not parameter.requires_grad:
                continue
            kind = next((f"{kind}_{suffixes}" for kind in _kinds(module) if f"{kind}_{suffixes}" in found), None)
            if kind is not None:
                known.add(id(parameter))
                found[kind].append(parameter)
    found["others"] = [one for one in model.parameters() if one.requires_grad and id(one) not in known]
    return found


def _kinds(module: nn.Module) -> tuple[str, ...]:
    """The kinds of a module, the most specific one first."""
    from torch import nn

    if isinstance(module, nn.Conv2d):
        if module.groups == module.in_channels:  # a dense convolution of one channel is depthwise, as in MQBench
            return "conv_dw", "conv"
        return ("conv_dense", "conv") if module.groups == 1 else ("conv",)
    if isinstance(module, nn.Linear):
        return ("linear",)
    return ("bn",) if isinstance(module, nn.modules.batchnorm._BatchNorm) else ()


def build_optimizer(
    name: str,
    parameters: Sequence[nn.Parameter] | Sequence[dict[str, Any]],
    *,
    lr: float,
    momentum: float,
    weight_decay: float = 0.0,
    foreach: bool | None = None,
) -> torch.optim.Optimizer:
    """SGD with Nesterov momentum, or AdamW with `momentum` as its first beta."""
    import torch

    if name == "adamw":
        betas = (momentum, 0.999)
        return torch.optim.AdamW(parameters, lr=lr, betas=betas, weight_decay=weight_decay, foreach=foreach)
    nesterov = momentum > 0
    return torch.optim.SGD(
        parameters, lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay, foreach=foreach
    )


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer of a run; each group stores its peak learning rate as `peak`, which the schedule multiplies."""
    from bitwright.training.qat import parameter_groups
    from bitwright.workload import trainable_parameters

    trainable_parameters(model)
    if config.recipe is not None:
        return config.recipe.make_optimizer(model)
    groups = parameter_groups(model, weight_decay=config.weight_decay, quantizer_lr=config.quantizer_lr)
    for group in groups:
        if group["name"] == "quantizers":
            group["weight_decay"] = config.quantizer_decay
    made = build_optimizer(config.optimizer, groups, lr=config.lr, momentum=config.momentum)
    for group in made.param_groups:
        group["peak"] = group["lr"]
    return made


def learning_rate_factor(config: TrainConfig, step: int, steps_per_epoch: int) -> float:
    """The learning rate at `step` (from 0), relative to its peak.

    >>> from bitwright.training.config import TrainConfig
    >>> [round(learning_rate_factor(TrainConfig(epochs=2, warmup=0.5), step, 4), 3) for step in range(8)]
    [0.333, 0.667, 1.0, 0.933, 0.75, 0.5, 0.25, 0.067]
    """
    warm = round(config.warmup * steps_per_epoch)
    if step < warm:
        return (step + 1) / (warm + 1)
    if config.schedule == "constant":
        return 1.0
    total = config.epochs * steps_per_epoch
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(total - warm, 1)))


class OptimizerWatch:
    """Collects the optimizers that step parameters of a model, until `stop`. For loops that Bitwright doesn't own."""

    def __init__(self, model: nn.Module) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self.model = model
        self.found: list[torch.optim.Optimizer] = []
        watch = weakref.ref(self)  # torch's hooks are global, and must not keep the model alive

        def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (self := watch()) is not None:
                self._add(optimizer)

        self._remove = weakref.finalize(self, register_optimizer_step_post_hook(look).remove)

    def _add(self, optimizer: torch.optim.Optimizer) -> None:
        if any(optimizer is known for known in self.found):
            return
        own = {id(p) for p in self.model.parameters()}
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            self.found.append(optimizer)

    def stop(self) -> None:
        """Remove the hook."""
        self._remove()
        self.found = []


def learned_parameter_problems(
    learned: Sequence[tuple[str, torch.nn.Parameter]], optimizers: Iterable[torch.optim.Optimizer]
) -> list[Problem]:
    """Whether optimizers omit learned quantizer parameters (with their sites) or apply weight decay to them."""
    decay = {
        parameter: float(group.get("weight_decay", 0.0))
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    absent = [site for site, p in learned if p.requires_grad and p not in decay]
    decaying = [site for site, p in learned if decay.get(p, 0.0) > 0.0]
    problems = []
    if absent:
        fix = "create the optimizer after Qat(...), with qat.parameter_groups(weight_decay=...)"
        what = "the optimizer doesn't contain learned quantizer parameters"
        problems.append(Problem(what=what, where=first_of(absent), fix=fix, code="not-in-optimizer"))
    if decaying:
        fix = "create the optimizer with qat.parameter_groups(weight_decay=...), which excludes quantizers"
        what = "weight decay would pull scales to zero"
        problems.append(Problem(what=what, where=first_of(decaying), fix=fix, code="scales-decay"))
    return problems


def first_of(names: Sequence[str]) -> str:
    """The first name, and the number of the others."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
