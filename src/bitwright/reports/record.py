"""`Record`: all results of one run, as versioned JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from bitwright.bench.comparison import Accuracy, Comparison, LatencyRow, Parity, Size
from bitwright.bench.leaderboard import Executed, OnDevice
from bitwright.core import documents
from bitwright.core.arguments import strict
from bitwright.core.documents import ResultModel, validated
from bitwright.core.environment import Environment
from bitwright.core.errors import BitwrightError, Problem
from bitwright.core.files import write_text
from bitwright.quantizers.site_statistics import SiteRow
from bitwright.reports.forecast import Forecast
from bitwright.reports.network import Node
from bitwright.reports.sensitivity import Sensitivity
from bitwright.reports.training import TrainingRecord
from bitwright.reports.tuning import TuningRecord

RECORD_VERSION: Literal[2] = 2


class FloatDistance(ResultModel):
    """Outputs of the simulated model compared with those of the float model."""

    samples: int
    sqnr_db: float | None = Field(description="Of the output with the largest deviation. None: no deviation.")
    top1_agreement: float | None
    far: bool = Field(description="Whether the result is unusable.")
    worst: dict[str, float | None] = Field(description="SQNR of the sites with the largest errors.")


class WarningRow(ResultModel):
    """A warning about the result."""

    code: str | None
    what: str
    where: str | None = None
    fix: str | None = None


class FloatOperator(ResultModel):
    """An operator that stayed in float, and the reason."""

    operator: str
    kind: str
    why: str


class StepRow(ResultModel):
    """A PTQ step that was run, with the settings that differ from its defaults."""

    step: str
    units: int = Field(description="Number of layers, blocks or pairs.")
    seconds: float = Field(description="In the process that finished the step.")
    skipped: dict[str, str] = Field(default_factory=dict, description="Skipped layers, with the reason.")


class GridRow(ResultModel):
    """One row of a grid of `bitwright bench`."""

    id: str = Field(description="The hash of `config`.")
    config: dict[str, Any] = Field(description="A grid with only this row, which can be run.")
    executed: Executed
    device: OnDevice | None = Field(default=None, description="None: not requested, or the backend has no runtime.")
    beyond: str | None = Field(
        default=None, description="The formats that were simulated although the backend can't run them."
    )
    notes: tuple[str, ...] = ()
    start: str = Field(description="The fingerprint of the float weights.")


class RunRow(ResultModel):
    """The main figures of another run of the same workload."""

    title: str
    created: str
    accuracy: Accuracy | None = None
    size: Size | None = None
    timing: LatencyRow | None = None


@strict
class Record(ResultModel):
    """One run. Each verb adds its part; parts that were not recorded are empty or None, and are not on the page."""

    version: Literal[1, 2] = Field(default=RECORD_VERSION, description="Version 1 has no fields after `steps`.")
    title: str
    workload: str
    backend: str | None = None
    created: str
    seed: int | None = None
    plan_sha256: str | None = None
    environment: Environment
    accuracies: tuple[Accuracy, ...] = ()
    sizes: tuple[Size, ...] = ()
    timings: tuple[LatencyRow, ...] = ()
    parities: tuple[Parity, ...] = ()
    sites: tuple[SiteRow, ...] = ()
    float_operators: tuple[FloatOperator, ...] = ()
    folds: dict[str, str] = Field(default_factory=dict)
    steps: tuple[StepRow, ...] = ()
    graph: tuple[Node, ...] = Field(default=(), description="The model's operators in the order of execution.")
    sensitivity: Sensitivity | None = Field(default=None, description="By `bitwright score`.")
    forecasts: tuple[Forecast, ...] = Field(default=(), description="By `bitwright predict`.")
    tuning: TuningRecord | None = Field(default=None, description="By `bitwright tune`.")
    training: TrainingRecord | None = Field(default=None, description="By `bitwright train`.")
    comparison: Comparison | None = Field(default=None, description="By `bitwright bench`.")
    row: GridRow | None = Field(default=None, description="By a grid of `bitwright bench`.")
    distance: FloatDistance | None = Field(default=None, description="None: not measured.")
    warnings: tuple[WarningRow, ...] = ()
    others: tuple[RunRow, ...] = Field(default=(), description="Runs that `bitwright report` joined with this one.")


def write_json(record: Record, path: str | Path) -> Path:
    """Write the record atomically."""
    return write_text(Path(path), record.model_dump_json(indent=1) + "\n")


def read_json(path: str | Path) -> Record:
    """Read a file of `write_json`, also of earlier versions."""
    fix = f"give a report.json of version 1 to {RECORD_VERSION}"
    if not Path(path).exists():
        fix = "give the output folder of `bitwright quantize`, `tune`, `train` or `deploy`, or its report.json"
        raise BitwrightError("the report does not exist", where=str(path), fix=fix, code="missing-file")
    data = documents.read_json(path, what="the report", fix=fix)
    if isinstance(data, dict) and "bitwright-leaderboard" in data:
        what = "can't read the report: this is a leaderboard"
        fix = f"bitwright grid leaderboard {path} -o page.html"
        raise BitwrightError(what, where=str(path), fix=fix, code="leaderboard-file")

    def refusal(problems: list[Problem]) -> BitwrightError:
        """Show two problems only: a file of another kind has dozens of similar ones."""
        more = f"; and {len(problems) - 2} more" if len(problems) > 2 else ""
        words = "; ".join(f"{one.where or 'the file'}: {one.what}" for one in problems[:2])
        return BitwrightError(f"can't read the report: {words}{more}", where=str(path), fix=fix, code="invalid-value")

    return validated(Record, data, title="", error=refusal)
