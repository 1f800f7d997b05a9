"""The settings of a training run, and those of a single step, which the profiler and predictions use."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bitwright.core.arguments import strict
from bitwright.core.errors import Problem, TrainError
from bitwright.core.formatting import counted
from bitwright.core.schemas import argument_problems
from bitwright.training.optimizer import Recipe

Amp = Literal["bf16", "fp16"]
# Settings that a recipe replaces.
_REPLACED = (
    *("epochs", "optimizer", "lr", "quantizer_lr", "momentum", "weight_decay", "quantizer_decay", "schedule"),
    *("warmup", "accumulate", "drop_last"),
)
AMP_DTYPES: Mapping[str, str] = {"bf16": "bfloat16", "fp16": "float16"}


@strict
class TrainConfig(BaseModel):
    """The settings of a training run, for float and QAT. They don't include the precision.

    >>> config = TrainConfig(epochs=3, lr=0.1)
    >>> config.epochs, config.optimizer
    (3, 'sgd')
    >>> TrainConfig(epoch=3)
    Traceback (most recent call last):
        ...
    bitwright.core.errors.TrainError: ...
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    epochs: int = Field(default=1, ge=1, le=10**6, description="Passes over the training data.")
    batch: int | None = Field(
        default=None,
        ge=1,
        le=10**9,
        description="Samples per process and step; by default that of the workload's loader, or 64.",
    )
    optimizer: Literal["sgd", "adamw"] = Field(default="sgd", description="SGD uses Nesterov momentum.")
    lr: float = Field(
        default=0.01, gt=0, le=1e6, description="Peak learning rate; not scaled by the number of processes."
    )
    quantizer_lr: float | None = Field(
        default=None,
        gt=0,
        le=1e6,
        description="Peak learning rate of scales and other quantizer state; by default lr.",
    )
    momentum: float = Field(default=0.9, ge=0, lt=1, description="SGD's momentum, or AdamW's first beta.")
    weight_decay: float = Field(
        default=1e-4, ge=0, le=1e6, description="Weight decay; not applied to quantizer state, norms and biases."
    )
    quantizer_decay: float = Field(
        default=0.0, ge=0, le=1e6, description="Weight decay of quantizer state; useful for PACT."
    )
    schedule: Literal["cosine", "constant"] = Field(default="cosine", description="Learning-rate schedule.")
    warmup: float = Field(default=0.0, ge=0, le=1e6, description="Epochs of linear warm-up; may be a fraction.")
    accumulate: int = Field(default=1, ge=1, le=10**6, description="Batches of accumulated gradients per step.")
    clip: float | None = Field(default=None, gt=0, le=1e30, description="Maximum norm of all gradients together.")
    amp: Amp | None = Field(
        default=None, description="Autocast type; fp16 uses loss scaling. Quantizers stay in float32."
    )
    ema: float | None = Field(
        default=None, gt=0, lt=1, description="Decay of averaged weights, which become the result."
    )
    label_smoothing: float = Field(default=0.0, ge=0, lt=1, description="Label smoothing; requires cross entropy.")
    distill: float = Field(default=0.0, ge=0, le=1, description="Weight of the distillation loss from the float model.")
    temperature: float = Field(default=1.0, gt=0, le=1e6, description="Softmax temperature of distillation.")
    patience: int | None = Field(
        default=None,
        ge=1,
        le=10**6,
        description="Stop after this many epochs without improvement; the best epoch is the result.",
    )
    freeze_observers: int | None = Field(
        default=None, ge=0, le=10**6, description="Freeze ranges that follow the data after this many epochs."
    )
    freeze_bn: int | None = Field(
        default=None, ge=0, le=10**6, description="Freeze batch-norm statistics after this many epochs."
    )
    parallel: Literal["ddp", "fsdp"] = Field(
        default="ddp", description="Whether processes hold replicas (DDP) or shards (FSDP2) of the model."
    )
    compile: bool = Field(default=False, description="Use torch.compile for the whole model.")
    fuse: bool = Field(default=True, description="Compile the arithmetic of quantizers separately.")
    channels_last: bool = Field(default=False, description="Use the NHWC memory format for images.")
    drop_last: bool = Field(
        default=False, description="Drop the short last batch of an epoch; otherwise every sample is used once."
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of data order, augmentation and dropout.")
    workers: int = Field(default=0, ge=0, le=10_000, description="Number of data-loading processes.")
    save_steps: int | None = Field(
        default=None, ge=1, le=2**53, description="Steps between checkpoints, in addition to each epoch's end."
    )
    log_steps: int = Field(default=10, ge=1, le=2**53, description="Steps between logged losses.")
    recipe: Recipe | None = Field(
        default=None, description="Settings in iterations, instead of epochs, optimizer, lr and schedule."
    )

    def __init__(self, **values: Any) -> None:
        """Validate all values at once."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise TrainError(argument_problems(error, TrainConfig.model_fields, "invalid-setting")) from None

    def problems(self) -> Iterator[Problem]:
        """Settings that contradict each other."""
        fields = type(self).model_fields
        for key in _REPLACED if self.recipe is not None else ():
            value = getattr(self, key)
            if value != fields[key].default:
                what = "the recipe has this setting"
                yield Problem(what=what, where=key, value=value, fix="change the recipe", code="ignored-argument")
        if self.recipe is None and self.warmup >= self.epochs:
            what, fix = "the warm-up is as long as the training", f"use less than {counted(self.epochs, 'epoch')}"
            yield Problem(what=what, where="warmup", value=self.warmup, fix=fix, code="warmup-too-long")

    def settings(self) -> dict[str, Any]:
        """All settings as plain data. Those that the recipe replaces, and a missing recipe, are left out."""
        return self.model_dump(exclude={"recipe"} if self.recipe is None else set(_REPLACED))

    @property
    def digest(self) -> str:
        """A short hash that names these settings."""
        data = self.model_dump_json(exclude={"recipe"} if self.recipe is None else set(_REPLACED))
        return hashlib.sha256(data.encode()).hexdigest()[:16]


@strict
class StepSettings(BaseModel):
    """The settings of one training step. They have the same names as in `TrainConfig`.

    >>> StepSettings(optimizer="adamw", clip=1.0).accumulate
    1
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    optimizer: Literal["sgd", "adamw"] = Field(default="sgd", description="SGD uses Nesterov momentum.")
    foreach: bool | None = Field(
        default=None, description="The optimizer's `foreach` argument; torch decides if not given."
    )
    momentum: float = Field(default=0.9, ge=0, lt=1, description="SGD's momentum, or AdamW's first beta.")
    clip: float | None = Field(default=None, gt=0, le=1e30, description="Maximum norm of all gradients together.")
    accumulate: int = Field(default=1, ge=1, le=10**6, description="Batches of accumulated gradients per step.")
    amp: Amp | None = Field(default=None, description="Autocast type; fp16 uses loss scaling.")
    schedule: bool = Field(default=True, description="Whether the learning rate changes at each step.")
    bucket_cap_mb: float | None = Field(
        default=None, gt=0, description="DDP's bucket size; DDP's default if not given."
    )
    fuse: bool = Field(default=True, description="Compile the arithmetic of quantizers.")

    @property
    def uses_foreach(self) -> bool:
        """Whether the optimizer processes all tensors at once; on CPUs, torch does so only on request.

        Profiles of GPUs come from traces and data sheets, and have the same cost for both.
        """
        return bool(self.foreach)
