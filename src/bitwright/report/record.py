"""`Record`: everything that one run found, versioned, as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from bitwright.bench.comparison import Accuracy, Comparison, Parity, Size, Timing
from bitwright.bench.leaderboard import Executed, OnDevice
from bitwright.core import documents
from bitwright.core.documents import ResultModel, validated
from bitwright.core.environment import Environment
from bitwright.core.errors import BitwrightError, Problem
from bitwright.core.files import write_text
from bitwright.quantizers.site_statistics import SiteRow
from bitwright.report.forecast import Forecast
from bitwright.report.network import Node
from bitwright.report.sensitivity import Sensitivity
from bitwright.report.training import Training
from bitwright.report.tuning import Tuning

RECORD_VERSION: Literal[2] = 2


class FloatDistance(ResultModel):
    """What the simulated model computes against what the float model computes."""

    samples: int
    sqnr_db: float | None = Field(description="Of the output that is farthest away. None: no deviation at all.")
    top1_agreement: float | None
    far: bool = Field(description="Whether the model has lost what it computed.")
    worst: dict[str, float | None] = Field(description="SQNR of the sites with the largest error of their own.")


class Warned(ResultModel):
    """Something to know about the result."""

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
    units: int = Field(description="Layers, blocks or pairs that it worked on.")
    seconds: float = Field(description="In the process that finished it.")
    skipped: dict[str, str] = Field(default_factory=dict, description="What it left alone, and why.")


class GridRow(ResultModel):
    """One row of a grid of `bitwright bench`."""

    id: str = Field(description="The hash of `config`.")
    config: dict[str, Any] = Field(description="A grid of this row alone: `bitwright bench` runs it as it is.")
    executed: Executed
    device: OnDevice | None = Field(default=None, description="None: not asked for, or the backend has no runtime.")
    beyond: str | None = Field(
        default=None, description="Where the backend's scheme was simulated at a width that it can't run: which."
    )
    notes: tuple[str, ...] = ()
    start: str = Field(description="The fingerprint of the float weights.")


class RunRow(ResultModel):
    """Another run of the same workload, in a few figures."""

    title: str
    created: str
    accuracy: Accuracy | None = None
    size: Size | None = None
    timing: Timing | None = None


class Record(ResultModel):
    """One run. A verb adds its own part; a part that nobody recorded is empty or None, and not on the page."""

    version: Literal[1, 2] = Field(default=RECORD_VERSION, description="1 has nothing after `steps`.")
    title: str
    workload: str
    backend: str | None = None
    created: str
    seed: int | None = None
    plan_sha256: str | None = None
    environment: Environment
    accuracies: tuple[Accuracy, ...] = ()
    sizes: tuple[Size, ...] = ()
    timings: tuple[Timing, ...] = ()
    parities: tuple[Parity, ...] = ()
    sites: tuple[SiteRow, ...] = ()
    float_operators: tuple[FloatOperator, ...] = ()
    folds: dict[str, str] = Field(default_factory=dict)
    steps: tuple[StepRow, ...] = ()
    graph: tuple[Node, ...] = Field(default=(), description="The model's operators in the order of execution.")
    sensitivity: Sensitivity | None = Field(default=None, description="By `bitwright score`.")
    forecasts: tuple[Forecast, ...] = Field(default=(), description="By `bitwright predict`.")
    tuning: Tuning | None = Field(default=None, description="By `bitwright tune`.")
    training: Training | None = Field(default=None, description="By `bitwright train`.")
    comparison: Comparison | None = Field(default=None, description="By `bitwright bench`.")
    row: GridRow | None = Field(default=None, description="By a grid of `bitwright bench`.")
    distance: FloatDistance | None = Field(default=None, description="None: not measured.")
    warnings: tuple[Warned, ...] = ()
    others: tuple[RunRow, ...] = Field(default=(), description="Runs that `bitwright report` put beside this one.")


def write_json(record: Record, path: str | Path) -> Path:
    """Write the record, whole or not at all."""
    return write_text(Path(path), record.model_dump_json(indent=1) + "\n")


def read_json(path: str | Path) -> Record:
    """Read what `write_json` wrote, also by earlier versions."""
    fix = f"give a report.json of version 1 to {RECORD_VERSION}"
    if not Path(path).exists():
        fix = "give a folder, or its report.json, that `bitwright quantize`, `tune`, `train` or `deploy` has written"
        raise BitwrightError("there is no such report", where=str(path), fix=fix)
    data = documents.read_json(path, what="the report", fix=fix)
    if isinstance(data, dict) and "bitwright-leaderboard" in data:
        what = "can't read the report: this is a leaderboard"
        raise BitwrightError(what, where=str(path), fix=f"bitwright leaderboard {path} -o page.html")

    def refusal(problems: list[Problem]) -> BitwrightError:
        """A file of another kind has dozens of problems that all say the same."""
        more = f"; and {len(problems) - 2} more" if len(problems) > 2 else ""
        words = "; ".join(f"{one.where or 'the file'}: {one.what}" for one in problems[:2])
        return BitwrightError(f"can't read the report: {words}{more}", where=str(path), fix=fix, code="invalid-value")

    return validated(Record, data, title="", error=refusal)
