"""The plan file, version 1, as pydantic models: what the YAML may say. Published as JSON Schema."""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from bitwright.core.documents import DeviceName, Filled

NO_FOLDING = -1
DEFAULT_STRATEGY = 4
STRATEGIES = {
    0: "folded once: statistics, γ and β are frozen",
    1: "running statistics are frozen, γ and β train",
    2: "folded with the statistics of the batch (two convolutions)",
    3: "folded with running statistics, output corrected to those of the batch (two convolutions)",
    4: "folded for rounding only, then the norm itself runs",
}
# these never look at the batch: there is nothing to synchronise
WITHOUT_BATCH = (0, 1)


def known_strategies(*, none: bool = False) -> str:
    """What may stand there, for an error's fix."""
    known = {NO_FOLDING: "no folding", **STRATEGIES} if none else STRATEGIES
    return "use one of: " + "; ".join(f"{number} ({meaning})" for number, meaning in known.items())


SCHEMA_VERSION = 1


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SiteEntry(_Strict):
    """One site's (or pattern's) entry; a bare text is short for `{format: text}`."""

    format: str | None = Field(default=None, description='Number format, e.g. "int8/channel/sym" or "float".')
    observer: str | dict[str, Any] | None = Field(
        default=None, description="Range observer: a name, or a mapping with `name` and its options."
    )
    quantizer: str | dict[str, Any] | None = Field(
        default=None, description="Quantizer: a name, or a mapping with `name` and its options."
    )
    guard: str | None = Field(default=None, description="Limit that keeps the target's accumulators exact.")
    share: Filled | None = Field(default=None, description="Use the quantizer of that other site.")
    why: str | None = Field(default=None, description="The reason of this choice.")


class FoldEntry(_Strict):
    """How one batch norm is folded; a bare text is short for `{into: text}`."""

    into: Filled = Field(description="The operator that takes in the norm.")
    strategy: int = Field(
        default=DEFAULT_STRATEGY,
        ge=min(STRATEGIES),
        le=max(STRATEGIES),
        strict=True,  # true isn't 1
        description="What happens in training: "
        + "; ".join(f"{number} {meaning}" for number, meaning in STRATEGIES.items())
        + ".",
    )
    sync: bool = Field(
        default=False,
        strict=True,
        description="Take batch statistics over all processes; nn.SyncBatchNorm always does.",
    )


class ComputeEntry(_Strict):
    """How operators are computed; a bare text is short for `{format: text}`."""

    format: Filled = Field(description="A kernel: int8, bf16, fp16, …; float for none.")
    backward: tuple[Literal["input", "weight"], ...] = Field(
        default=("input",), description="Products of the backward pass that run in that precision, too."
    )
    stochastic: bool = Field(default=False, strict=True, description="Round gradients at random.")
    scales: Literal["row", "tensor"] = Field(
        default="row", description="Of integers: one for each sample, token or output of a weight, or for the tensor."
    )
    why: str | None = None


class DeviceEntry(_Strict):
    """What differs on one kind of device."""

    sites: dict[Filled, SiteEntry | str] = Field(default_factory=dict)
    compute: dict[Filled, ComputeEntry | str] = Field(default_factory=dict)
    batch: int | None = Field(
        default=None, ge=1, le=10**9, strict=True, description="Samples of each step on such a device."
    )
    channels_last: bool = Field(
        default=False, strict=True, description="Images are NHWC in memory: what was planned holds for that layout."
    )
    why: str | None = None


class PlanFile(_Strict):
    """A Bitwright plan: for each site of a model its number format, and why."""

    bitwright: Literal[1] = Field(description="Version of this schema.")
    model: Filled | None = Field(default=None, description="Name of the model, for people.")
    backend: Filled | None = Field(default=None, description="The target whose rules placed these quantizers.")
    sites: dict[Filled, SiteEntry | str] = Field(
        default_factory=dict,
        description="Sites by name or pattern (*, ?, [abc]). "
        "An exact name beats patterns; a later pattern beats an earlier one.",
    )
    fold: dict[Filled, FoldEntry | str] = Field(
        default_factory=dict,
        description="Batch norms that are folded: norm operator → the operator before it, "
        "or a mapping with `into` and `strategy`.",
    )
    float: dict[Filled, str] = Field(default_factory=dict, description="Operators that stay in float, with the reason.")
    compute: dict[Filled, ComputeEntry | str] = Field(
        default_factory=dict,
        description="Operators that really run in low precision when training, by name or pattern.",
    )
    devices: dict[DeviceName, DeviceEntry] = Field(
        default_factory=dict, description="Differences per kind of device, for clusters of unequal machines."
    )


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a plan file."""
    schema = PlanFile.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "bitwright-plan-1", **schema}


if __name__ == "__main__":  # python -m bitwright.plan.schema > docs/schemas/plan-1.json
    sys.stdout.write(json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n")
