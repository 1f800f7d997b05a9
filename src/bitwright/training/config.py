"""What a training run is told: one frozen object, checked as a whole before anything starts."""

from __future__ import annotations

import hashlib
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bitwright.core.arguments import strict
from bitwright.core.errors import Problem, TrainError, did_you_mean


@strict
class TrainConfig(BaseModel):
    """The settings of a run. A float run and a QAT run have the same ones: precision isn't among them."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    epochs: int = Field(default=1, ge=1, le=10**6, description="Passes over the training data.")
    batch: int | None = Field(
        default=None,
        ge=1,
        le=10**9,
        description="Samples per process and step; what the workload's loader has, else 64.",
    )
    optimizer: Literal["sgd", "adamw"] = Field(default="sgd", description="SGD has Nesterov momentum.")
    lr: float = Field(
        default=0.01, gt=0, le=1e6, description="Peak learning rate, never scaled by the number of processes."
    )
    quantizer_lr: float | None = Field(
        default=None,
        gt=0,
        le=1e6,
        description="Peak learning rate of scales and other quantizer state; lr if not given.",
    )
    momentum: float = Field(default=0.9, ge=0, lt=1, description="SGD's momentum, or AdamW's first beta.")
    weight_decay: float = Field(
        default=1e-4, ge=0, le=1e6, description="Not applied to quantizer state, norms and biases."
    )
    quantizer_decay: float = Field(
        default=0.0, ge=0, le=1e6, description="Weight decay of quantizer state: PACT wants some."
    )
    schedule: Literal["cosine", "constant"] = Field(default="cosine", description="How the learning rate goes down.")
    warmup: float = Field(default=0.0, ge=0, le=1e6, description="Epochs, or a part of one, in which it goes up.")
    accumulate: int = Field(default=1, ge=1, le=10**6, description="Batches whose gradients make one step.")
    clip: float | None = Field(default=None, gt=0, le=1e30, description="Largest norm of all gradients together.")
    amp: Literal["bf16", "fp16"] | None = Field(
        default=None, description="Autocast; fp16 with loss scaling. Quantizers stay float32."
    )
    ema: float | None = Field(default=None, gt=0, lt=1, description="Decay of averaged weights, which are the result.")
    label_smoothing: float = Field(default=0.0, ge=0, lt=1, description="Needs cross entropy as the loss.")
    distill: float = Field(default=0.0, ge=0, le=1, description="Share of the loss that the float model teaches.")
    temperature: float = Field(default=1.0, gt=0, le=1e6, description="Of the teacher's and the student's softmax.")
    patience: int | None = Field(
        default=None,
        ge=1,
        le=10**6,
        description="Stop after so many epochs without a better metric; the best is the result.",
    )
    freeze_observers: int | None = Field(
        default=None, ge=0, le=10**6, description="Ranges that follow the data stand still after so many epochs."
    )
    freeze_bn: int | None = Field(
        default=None, ge=0, le=10**6, description="Batch-norm statistics stand still after so many epochs."
    )
    parallel: Literal["ddp", "fsdp"] = Field(
        default="ddp", description="Several processes have replicas (DDP) or shards (FSDP2) of the model."
    )
    compile: bool = Field(default=False, description="torch.compile the whole model.")
    fuse: bool = Field(default=True, description="Compile the quantizers' arithmetic on its own.")
    channels_last: bool = Field(default=False, description="Keep images as NHWC in memory.")
    drop_last: bool = Field(
        default=False, description="Leave an epoch's short last batch out; else each sample is seen once in it."
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="Of data order, augmentation and dropout.")
    workers: int = Field(default=0, ge=0, le=10_000, description="Processes that load data.")
    save_steps: int | None = Field(
        default=None, ge=1, le=2**53, description="Checkpoint so often, beside each epoch's end."
    )
    log_steps: int = Field(default=10, ge=1, le=2**53, description="Write losses so often.")

    def __init__(self, **values: Any) -> None:
        """Check all values at once."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise TrainError([_problem(detail) for detail in error.errors()]) from None

    @property
    def digest(self) -> str:
        """A short hash that names these settings."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]


def _problem(detail: Any) -> Problem:
    key = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        near = did_you_mean(key, TrainConfig.model_fields)
        return Problem(what="unknown setting", where=key, fix=near, code="unknown-argument")
    field = TrainConfig.model_fields.get(key)
    fix = field.description if field is not None else None
    return Problem(what=detail["msg"], where=key, value=detail["input"], fix=fix)
