"""The plan file, version 1, as pydantic models. Published as JSON Schema."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from bitwright.core.schemas import DeviceName, NonBlank

NO_FOLDING = -1
DEFAULT_STRATEGY = 4
STRATEGIES = {
    0: "folded once: statistics, γ and β are frozen",
    1: "running statistics are frozen, γ and β train",
    2: "folded with the statistics of the batch (two convolutions)",
    3: "folded with running statistics, output corrected to those of the batch (two convolutions)",
    4: "folded for rounding only, then the norm itself runs",
}
# these strategies don't use batch statistics, so they need no synchronization
WITHOUT_BATCH = (0, 1)


def known_strategies(*, none: bool = False) -> str:
    """The valid strategies, for an error's fix."""
    known = {NO_FOLDING: "no folding", **STRATEGIES} if none else STRATEGIES
    return "use one of: " + "; ".join(f"{number} ({meaning})" for number, meaning in known.items())


SCHEMA_VERSION = 1


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SiteEntry(_Strict):
    """The entry of a site or pattern. A string is short for `{format: string}`."""

    format: str | None = Field(default=None, description='Number format, e.g. "int8/channel/sym" or "float".')
    observer: str | dict[str, Any] | None = Field(
        default=None, description="Range observer: a name, or a mapping with `name` and its options."
    )
    quantizer: str | dict[str, Any] | None = Field(
        default=None, description="Quantizer: a name, or a mapping with `name` and its options."
    )
    guard: str | None = Field(default=None, description="A limit on weights for exact accumulators on the target.")
    share: NonBlank | None = Field(default=None, description="Use the quantizer of this other site.")
    why: str | None = Field(default=None, description="The reason for this choice.")


class FoldEntry(_Strict):
    """How one batch norm is folded. A string is short for `{into: string}`."""

    into: NonBlank = Field(description="The operator that the norm is folded into.")
    strategy: int = Field(
        default=DEFAULT_STRATEGY,
        ge=min(STRATEGIES),
        le=max(STRATEGIES),
        strict=True,  # reject true for 1
        description="What happens in training: "
        + "; ".join(f"{number} {meaning}" for number, meaning in STRATEGIES.items())
        + ".",
    )
    sync: bool = Field(
        default=False,
        strict=True,
        description="Compute batch statistics over all processes; nn.SyncBatchNorm always does.",
    )


class ComputeEntry(_Strict):
    """How operators are computed. A string is short for `{format: string}`."""

    format: NonBlank = Field(description="A kernel: int8, bf16, fp16, …; `float` for no kernel.")
    backward: tuple[Literal["input", "weight"], ...] = Field(
        default=("input",), description="Backward products that also run in this precision."
    )
    stochastic: bool = Field(default=False, strict=True, description="Round gradients stochastically.")
    scales: Literal["row", "tensor"] = Field(
        default="row", description="Integer scales: one per sample, token or weight output, or one per tensor."
    )
    why: str | None = None


class DeviceEntry(_Strict):
    """The differences of one device type."""

    sites: dict[NonBlank, SiteEntry | str] = Field(default_factory=dict)
    compute: dict[NonBlank, ComputeEntry | str] = Field(default_factory=dict)
    batch: int | None = Field(
        default=None, ge=1, le=10**9, strict=True, description="Samples per step on such a device."
    )
    channels_last: bool = Field(
        default=False, strict=True, description="The plan was made for images in channels-last memory format."
    )
    why: str | None = None


class PlanFile(_Strict):
    """A Bitwright plan: the number format of each site of a model, with the reason."""

    bitwright: Literal[1] = Field(description="Version of this schema.")
    model: NonBlank | None = Field(default=None, description="Name of the model, for readers.")
    backend: NonBlank | None = Field(default=None, description="The backend of this plan.")
    sites: dict[NonBlank, SiteEntry | str] = Field(
        default_factory=dict,
        description="Sites by name or pattern (*, ?, [abc]). "
        "An exact name overrides patterns; a later pattern overrides an earlier one.",
    )
    fold: dict[NonBlank, FoldEntry | str] = Field(
        default_factory=dict,
        description="Batch norms that are folded: norm operator → the preceding operator, "
        "or a mapping with `into` and `strategy`.",
    )
    float: dict[NonBlank, str] = Field(
        default_factory=dict, description="Operators that stay in float, with the reason."
    )
    compute: dict[NonBlank, ComputeEntry | str] = Field(
        default_factory=dict,
        description="Operators that run in low precision in training, by name or pattern.",
    )
    devices: dict[DeviceName, DeviceEntry] = Field(
        default_factory=dict, description="Differences per device type, for heterogeneous clusters."
    )


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a plan file."""
    schema = PlanFile.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "bitwright-plan-1", **schema}
