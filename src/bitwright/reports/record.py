"""`Record`: all results of one run, as versioned JSON. `make_record` makes it from a quantized model."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from hashlib import sha256
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from bitwright.bench.comparison import Accuracy, Comparison, LatencyRow, Parity, Size
from bitwright.bench.leaderboard import Executed, ExecutedSites, OnDevice
from bitwright.core import documents
from bitwright.core.arguments import strict
from bitwright.core.environment import Environment, environment
from bitwright.core.errors import BitwrightError, Problem
from bitwright.core.files import write_text
from bitwright.core.formatting import counted, number, span
from bitwright.core.schemas import ResultModel, validated
from bitwright.deployment import Distance
from bitwright.graph import Graph
from bitwright.ptq.quantize import Quantized
from bitwright.quantizers.site_statistics import SiteRow, site_rows
from bitwright.reports.sections import Forecast, Sensitivity, TrainingRecord, TuningRecord

RECORD_VERSION: Literal[2] = 2


class FloatDistance(ResultModel):
    """Outputs of the simulated model compared with those of the float model."""

    samples: int
    sqnr_db: float | None = Field(description="SQNR of the output with the largest deviation. None: no deviation.")
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
    seconds: float = Field(description="Time in the process that finished the step.")
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
    """One run. Each verb adds its part; parts that were not recorded are empty or None, and are not on the page.

    >>> from bitwright.reports import Accuracy, new_record
    >>> record = new_record("tiny", accuracies=(Accuracy(where="float", metric="top1", value=91.5),))
    >>> record.title, record.accuracies[0].text
    ('tiny', '91.50 %')
    """

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
    sensitivity: Sensitivity | None = Field(default=None, description="The result of `bitwright score`.")
    forecasts: tuple[Forecast, ...] = Field(default=(), description="The results of `bitwright predict`.")
    tuning: TuningRecord | None = Field(default=None, description="The result of `bitwright tune`.")
    training: TrainingRecord | None = Field(default=None, description="The result of `bitwright train`.")
    comparison: Comparison | None = Field(default=None, description="The result of `bitwright bench`.")
    row: GridRow | None = Field(default=None, description="The row of a grid.")
    distance: FloatDistance | None = Field(default=None, description="None: not measured.")
    warnings: tuple[WarningRow, ...] = ()
    others: tuple[RunRow, ...] = Field(default=(), description="Runs that `bitwright report` joined with this one.")

    def __repr__(self) -> str:
        parts = [f"{counted(len(self.sites), 'site')}"] if self.sites else []
        parts += [
            name for name in ("sensitivity", "forecasts", "tuning", "training", "comparison") if getattr(self, name)
        ]
        return f"<Record {self.title}: {', '.join(parts) or 'empty'}>"

    __str__ = __repr__


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


def float_distance(distance: Distance) -> FloatDistance:
    """The row of a distance from the float model."""
    return FloatDistance(
        samples=distance.samples,
        sqnr_db=_finite(distance.sqnr_db),
        top1_agreement=distance.top1_agreement,
        far=distance.far,
        worst={site.site: _finite(site.sqnr_db) for site in distance.worst},
    )


def _finite(sqnr: float) -> float | None:
    """JSON has no infinities: +inf dB (no deviation) becomes None, and -inf dB becomes -999."""
    return sqnr if isfinite(sqnr) else None if sqnr > 0 else -999.0


def warning_rows(problems: Iterable[Problem]) -> tuple[WarningRow, ...]:
    """Warnings as rows."""
    return tuple(WarningRow(code=one.code, what=one.what, where=one.where, fix=one.fix) for one in problems)


@strict
def make_record(
    quantized: Quantized,
    batches: Iterable[Any],
    *,
    workload: str,
    title: str | None = None,
    seed: int | None = None,
    accuracies: Iterable[Accuracy] = (),
    sizes: Iterable[Size] = (),
    timings: Iterable[LatencyRow] = (),
    parities: Iterable[Parity] = (),
    histograms: bool = True,
    sites: tuple[SiteRow, ...] | None = None,
    distance: Distance | None = None,
    warnings: Iterable[Problem] | None = None,
) -> Record:
    """Make the record of one run.

    The statistics and `histograms` of the sites are measured on `batches`, unless `sites` has them already. `distance`
    from the float model and `warnings` are by default those of `quantize`.
    """
    plan, graph = quantized.plan, quantized.graph
    distance = distance or quantized.distance
    return Record(
        title=title or f"{workload} for {quantized.backend}",
        workload=workload,
        backend=quantized.backend,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        seed=seed,
        plan_sha256=sha256(plan.to_yaml().encode()).hexdigest(),
        environment=environment(),
        accuracies=tuple(accuracies),
        sizes=tuple(sizes),
        timings=tuple(timings),
        parities=tuple(parities),
        sites=site_rows(quantized.model, batches, histograms=histograms) if sites is None else sites,
        graph=network(graph),
        float_operators=tuple(
            FloatOperator(
                operator=name, kind=graph.by_name[name].kind if name in graph.by_name else "parameter", why=why
            )
            for name, why in plan.float.items()
        ),
        folds={norm: str(fold) for norm, fold in plan.fold.items()},
        distance=None if distance is None else float_distance(distance),
        warnings=warning_rows(quantized.warnings if warnings is None else warnings),
        steps=tuple(
            StepRow(step=ran.step, units=ran.units, seconds=ran.seconds, skipped=ran.skipped) for ran in quantized.steps
        ),
    )


def own_accuracy(record: Record) -> Accuracy:
    """The quantized model's accuracy on the backend's runtime, else on the first checked one, else the last known."""
    names = [record.backend, *(one.runtime for one in record.parities), *(one.runtime for one in record.timings)]
    found = {one.where: one for one in record.accuracies[1:]}
    return next((found[name] for name in names if name in found), record.accuracies[-1])


def own_timings(record: Record) -> tuple[LatencyRow, ...]:
    """Timings of the run, else those that `bitwright bench` measured on the backend's runtime, else on the first."""
    if record.timings or record.comparison is None:
        return record.timings
    rows = [row for row in record.comparison.runtimes if row.timings]
    own = [row for row in rows if record.backend in (row.backend, row.runtime)]
    return next((row.timings for row in (*own, *rows)), ())


def float_and_quantized(record: Record) -> tuple[Size, Size] | None:
    """The two sizes to compare; the first is the reference."""
    return (record.sizes[0], record.sizes[-1]) if len(record.sizes) > 1 else None


def observed_range(site: SiteRow) -> tuple[float, float] | None:
    """The smallest and largest number that reached a site; None: not measured."""
    return None if site.seen_low is None or site.seen_high is None else (site.seen_low, site.seen_high)


def ranges(site: SiteRow) -> tuple[str, str]:
    """The range of the numbers at a site, and the range of its grid.

    The grid of a 32-bit accumulator is far wider than any number, so it is omitted.
    """
    wide = site.format.startswith("int32")
    grid = "" if wide else span(number(site.low), number(site.high))
    found = observed_range(site)
    return ("–" if wide else grid, "") if found is None else (span(*map(number, found)), grid)


def environment_facts(record: Record) -> list[tuple[str, str]]:
    """Names and values of the environment of a run."""
    found = record.environment
    items = [
        ("Machine", f"{found.cpu}, {found.cores} cores, {found.platform}"),
        ("CPU features", ", ".join(found.cpu_features) or "none known"),
        ("Threads of torch", str(found.threads)),
        ("Python", found.python),
        ("Packages", ", ".join(f"{name} {version}" for name, version in found.packages.items())),
        ("Seed", "none" if record.seed is None else str(record.seed)),
    ]
    return items if record.plan_sha256 is None else [*items, ("Plan (SHA-256)", record.plan_sha256)]


def executed_sites(row: GridRow) -> list[tuple[str, ExecutedSites]]:
    """What ran at weights, then at activations."""
    both = {"weights": row.executed.weights, "activations": row.executed.activations}
    return [(role, one) for role, found in both.items() for one in found]


def row_facts(row: GridRow) -> list[tuple[str, str]]:
    """Names and values that describe how a row of a grid ran, without its quantizers."""
    folded = ", ".join(f"{count} by strategy {strategy}" for strategy, count in row.executed.folding.items())
    items = [
        ("Row", row.id),
        ("Float weights", row.start),
        ("Norms", f"folded: {folded}" if folded else "not folded"),
        ("Biases on the accumulator's grid", str(row.executed.biases)),
    ]
    device = row.device
    if device is not None:
        kinds = ", ".join(f"{count} {kind}" for kind, count in (device.kinds or {}).items() if count)
        told = [] if device.gap is None else [f"{device.gap:+.2f} points from simulated"]
        told += [f"ran {kinds}"] if kinds else []
        items.append((f"On {device.runtime}", device.reason or "; ".join(told)))
    if row.beyond is not None:
        items.append(("Beyond the backend", row.beyond))
    return [*items, *(("Note", note) for note in row.notes)]


class Node(ResultModel):
    """One operator."""

    name: str
    kind: str
    inputs: tuple[str, ...] = Field(description="Operators that produce its inputs.")
    shape: tuple[int, ...] = Field(description="The shape of its first result.")
    macs: int
    level: int = Field(description="Length of the longest path from the inputs.")
    lane: int = Field(description="Its position among the operators of its level; 0 is the main path.")


@strict
def network(graph: Graph) -> tuple[Node, ...]:
    """The operators that depend on the input, with their positions in the drawing."""
    ops = [op for op in graph.ops if not op.constant]
    known = {op.name for op in ops}
    inputs = {
        op.name: tuple(dict.fromkeys(s.name for p in op.ports for s in p.sources if s.kind == "op" and s.name in known))
        for op in ops
    }
    places = lay_out([(op.name, inputs[op.name]) for op in ops])
    return tuple(
        Node(
            name=op.name,
            kind=op.kind,
            inputs=inputs[op.name],
            shape=op.outputs[0].shape if op.outputs else (),
            macs=op.macs,
            level=places[op.name][0],
            lane=places[op.name][1],
        )
        for op in ops
    )


def lay_out(operators: Iterable[tuple[str, tuple[str, ...]]]) -> dict[str, tuple[int, int]]:
    """Assign (level, lane) to each operator. Producers come before their consumers.

    An operator takes the lane of the producer on its longest path, or the nearest free lane. A chain is therefore a
    straight line, and branches run parallel to it.

    >>> lay_out([("a", ()), ("b", ("a",)), ("short", ("a",)), ("c", ("b",)), ("add", ("c", "short"))])
    {'a': (0, 0), 'b': (1, 0), 'short': (1, 1), 'c': (2, 0), 'add': (3, 0)}
    """
    places: dict[str, tuple[int, int]] = {}
    taken: set[tuple[int, int]] = set()
    for name, inputs in operators:
        # A producer that comes later is a loop of recurrent code; it is ignored.
        before = [places[producer] for producer in inputs if producer in places]
        level = 1 + max((place[0] for place in before), default=-1)
        wanted = next((lane for above, lane in before if above == level - 1), 0)
        lane = next(
            n for step in range(len(taken) + 2) for n in (wanted + step, wanted - step) if _free(level, n, taken)
        )
        places[name] = (level, lane)
        taken.add((level, lane))
    return places


def _free(level: int, lane: int, taken: set[tuple[int, int]]) -> bool:
    return lane >= 0 and (level, lane) not in taken
