"""`Record`: everything that one run found, versioned, as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bitwright.errors import BitwrightError
from bitwright.files import write_text

RECORD_VERSION: Literal[1] = 1


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


class Accuracy(Frozen):
    """The workload's metric for one way to run the model."""

    where: str = Field(description='"float", "simulated", or the name of a runtime.')
    metric: str
    value: float
    samples: int | None = None


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


class Record(Frozen):
    """One run."""

    version: Literal[1] = RECORD_VERSION
    title: str
    workload: str
    backend: str
    created: str
    seed: int | None = None
    plan_sha256: str
    environment: Environment
    accuracies: tuple[Accuracy, ...] = ()
    sizes: tuple[Size, ...] = ()
    timings: tuple[Timing, ...] = ()
    parities: tuple[Parity, ...] = ()
    sites: tuple[SiteRow, ...] = ()
    float_operators: tuple[FloatOperator, ...] = ()
    folds: dict[str, str] = Field(default_factory=dict)
    steps: tuple[StepRow, ...] = ()


def write_json(record: Record, path: str | Path) -> Path:
    """Write the record, whole or not at all."""
    return write_text(Path(path), record.model_dump_json(indent=1) + "\n")


def read_json(path: str | Path) -> Record:
    """Read what `write_json` wrote."""
    try:
        return Record.model_validate_json(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        raise BitwrightError(
            f"can't read the report: {error}",
            where=str(path),
            fix=f"give a report.json of version {RECORD_VERSION}",
        ) from error
