"""The plan file, version 1, as pydantic models, published as JSON Schema; and `ComputeSpec`, an entry of `compute`."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from bitwright.core.arguments import strict
from bitwright.core.registry import KERNELS
from bitwright.core.schemas import DeviceName, NonBlank
from bitwright.graph import Graph

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
FLOAT = "float"
GRADIENTS = ("input", "weight")
SCALES = ("row", "tensor")


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
    axis: int | None = Field(
        default=None, strict=True, description="The axis of groups, at an operator that selects weights of experts."
    )
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


@strict
@dataclass(frozen=True, kw_only=True)
class ComputeSpec:
    """How one operator is computed."""

    format: str = FLOAT
    """The kernel: int8, bf16, fp16, …. `float` in a device's section disables the kernel."""
    backward: tuple[str, ...] = GRADIENTS[:1]
    """The backward products that also run in this precision: of the `input`, of the `weight`."""
    stochastic: bool = False
    """Whether gradients are rounded stochastically (unbiased)."""
    scales: str = SCALES[0]
    """Integer scales: one per `row` (a sample or token; an output of a weight), or one per `tensor`."""
    why: str = ""

    @property
    def is_low_precision(self) -> bool:
        """Whether the operator runs in low precision."""
        return self.format != FLOAT

    @property
    def per_tensor(self) -> bool:
        """Whether each tensor has a single scale."""
        return self.scales == SCALES[1]

    def entry(self) -> dict[str, Any] | str:
        """The entry in a plan file, without default values."""
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        if "backward" in changed:
            changed["backward"] = list(self.backward)
        return self.format if set(changed) <= {"format"} else {"format": self.format, **changed}


def resolve_compute(layers: list[Mapping[str, ComputeSpec]], graph: Graph) -> dict[str, ComputeSpec]:
    """The spec of each operator. In each layer, exact names override patterns, and later entries earlier ones."""
    found: dict[str, ComputeSpec] = {}
    for op in graph.ops:
        for layer in layers:
            keys = [key for key in reversed(list(layer)) if fnmatch.fnmatchcase(op.name, key) or key == op.name]
            if keys:
                spec = layer[op.name if op.name in layer else keys[0]]
                # a pattern applies to the operators that the kernel supports
                exact = op.name in layer
                if exact or not spec.is_low_precision or KERNELS.get(spec.format).refuses(op, spec) is None:
                    found[op.name] = spec
                    break
    return found
