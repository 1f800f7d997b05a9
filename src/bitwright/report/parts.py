"""Rows of a record: what nearly every run has."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from bitwright.arguments import strict


class Frozen(BaseModel):
    """A part of a record: nothing unknown in it, and nothing changes."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Environment(Frozen):
    """Where it was measured."""

    bitwright: str
    python: str
    platform: str
    cpu: str
    cpu_features: tuple[str, ...]
    cores: int
    threads: int = Field(description="Threads of torch.")
    packages: dict[str, str]


@strict
class Accuracy(Frozen):
    """The workload's metric for one way to run the model."""

    where: str = Field(description='"float", "simulated", or the name of a runtime.')
    metric: str
    value: float
    samples: int | None = None
    lower_is_better: bool = False


class Size(Frozen):
    """Bytes of one form of the model."""

    name: str
    bytes: int


class Timing(Frozen):
    """Latency of one artefact; both variants of a runtime were measured in turns."""

    runtime: str
    variant: Literal["float", "quantized"]
    batch: int
    threads: int
    median_ms: float = Field(description="p50")
    p10_ms: float
    p90_ms: float
    p99_ms: float | None = Field(default=None, description="None in reports that were made before it was measured.")
    runs: int
    ratio: float = Field(description="Median relative to the float variant in the same run.")


class Parity(Frozen):
    """What a runtime computes against what the simulated model computes."""

    runtime: str
    passed: bool
    samples: int
    sqnr_db: float | None = Field(description="None: no deviation at all.")
    max_error: float
    top1_agreement: float | None
    first_divergence: str | None


class FloatDistance(Frozen):
    """What the simulated model computes against what the float model computes."""

    samples: int
    sqnr_db: float | None = Field(description="Of the output that is farthest away. None: no deviation at all.")
    top1_agreement: float | None
    far: bool = Field(description="Whether the model has lost what it computed.")
    worst: dict[str, float | None] = Field(description="SQNR of the sites with the largest error of their own.")


class Warned(Frozen):
    """Something to know about the result."""

    code: str | None
    what: str
    where: str | None = None
    fix: str | None = None


class Histogram(Frozen):
    """How often numbers fall between `low` and `high`, in bins of equal width.

    The ends are those of the grid and from an eighth of its span beyond, as far as the first batch reaches; where the
    grid is far wider than the numbers, they are those of the numbers. What is further out is in the outermost bins.
    """

    low: float
    high: float
    counts: tuple[int, ...]


class SiteRow(Frozen):
    """One quantizer at one site."""

    site: str
    format: str
    observer: str
    quantizer: str
    guard: str | None
    share: str | None
    scales: int = Field(description="How many scales there are: one, or one per channel or group.")
    scale_min: float
    scale_max: float
    zero_point_min: int
    zero_point_max: int
    low: float = Field(description="The lowest number that the grid has.")
    high: float
    clipped: float | None = Field(description="Share of numbers beyond the grid's ends. None: never reached.")
    sqnr_db: float | None = Field(description="The cost of this quantizer alone. None: nothing, or never reached.")
    why: str
    seen_low: float | None = Field(default=None, description="The least number that reached it. None: not looked at.")
    seen_high: float | None = None
    histogram: Histogram | None = Field(default=None, description="None: not asked for, or never reached.")


class FloatOperator(Frozen):
    """An operator that stayed in float, and the reason."""

    operator: str
    kind: str
    why: str


class StepRow(Frozen):
    """A PTQ step that was run, with the settings that differ from its defaults."""

    step: str
    units: int = Field(description="Layers, blocks or pairs that it worked on.")
    seconds: float = Field(description="In the process that finished it.")
    skipped: dict[str, str] = Field(default_factory=dict, description="What it left alone, and why.")
