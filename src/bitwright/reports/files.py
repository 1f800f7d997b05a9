"""The report files of a run: `report.json`, `report.html` and `report.md`, and one page for several runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from bitwright.bench.comparison import Accuracy, Comparison
from bitwright.bench.grid_row import FinishedRow
from bitwright.bench.leaderboard import Result
from bitwright.cluster import Prediction
from bitwright.core.arguments import reject_unknown, strict
from bitwright.core.environment import environment
from bitwright.core.errors import BitwrightError
from bitwright.core.files import write_text
from bitwright.core.output_folder import locked, staged_output
from bitwright.ptq.quantize import Quantized
from bitwright.reports.markdown import write_markdown
from bitwright.reports.page import page
from bitwright.reports.record import (
    RECORD_VERSION,
    GridRow,
    Record,
    RunRow,
    make_record,
    own_accuracy,
    read_json,
    write_json,
)
from bitwright.reports.sections import TrainingRecord, forecast, sensitivity, training_record, tuning_record
from bitwright.sensitivity import Scores
from bitwright.training import Callback, TrainConfig
from bitwright.training.run import TrainingRun
from bitwright.tuning import Tuned


def write_html(record: Record, path: str | Path) -> Path:
    """Write the page atomically."""
    return write_text(Path(path), page(record))


REPORT = "report.json"
_PARTS = ("sensitivity", "tuning", "training", "comparison")


@strict
def write_report(record: Record, folder: str | Path) -> Path:
    """Write the record as JSON, HTML and Markdown. Returns the path of the HTML page."""
    with staged_output(folder) as staged:  # all three files appear at the same time
        write_json(record, staged / REPORT)
        write_markdown(record, staged / "report.md")
        write_html(record, staged / "report.html")
    return Path(folder) / "report.html"


def new_record(workload: str, **parts: Any) -> Record:
    """A record without a quantized model, with the given parts."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Record(title=workload, workload=workload, created=now, environment=environment(), **parts)


def report_of(folder: str | Path, workload: str) -> Record:
    """The report in a folder, or a new one if there is none. A report of another workload is an error."""
    path = Path(folder) / REPORT
    if not path.is_file():
        return new_record(workload)
    found = read_json(path)
    if found.workload != workload:
        raise BitwrightError(
            "the report in this folder belongs to another workload",
            where=str(folder),
            value=f"{found.workload!r}, not {workload!r}",
            fix="choose another folder",
            code="other-workload",
        )
    return found


@strict
def add_to_report(folder: str | Path, workload: str, **parts: Any) -> Record:
    """Add parts (`sensitivity=`, `forecasts=`, …) to the report in a folder, or create it.

    Existing parts of the same name are replaced; forecasts are replaced by their own name.
    """
    reject_unknown("add_to_report", parts, Record.model_fields)
    with locked(folder, wait=30.0):  # a second process waits until the first has finished
        return _added(folder, workload, parts)


def _added(folder: str | Path, workload: str, parts: dict[str, Any]) -> Record:
    before = report_of(folder, workload)
    if "forecasts" in parts:
        new = {one.name for one in parts["forecasts"]}
        parts["forecasts"] = (*(one for one in before.forecasts if one.name not in new), *parts["forecasts"])
    record = before.model_copy(update={**parts, "version": RECORD_VERSION})
    write_report(record, folder)
    return record


class TrainReport(Callback):
    """Writes the report of a training run together with its result."""

    def on_result(self, run: TrainingRun, folder: Path) -> None:
        """Write the report into the folder of the result."""
        write_report(new_record(run.workload.name, seed=run.config.seed, training=training_record(folder)), folder)


def join(records: Sequence[Record], names: Sequence[str] | None = None) -> Record:
    """Join several runs of one workload into one record.

    The first record with sites is shown in full. Parts that it lacks come from the others. Each of the others is also
    a row, named by its title or by `names`.
    """
    if not records:
        raise BitwrightError("no reports to join", fix="give folders that contain a report.json", code="no-reports")
    first = next((record for record in records if record.sites), records[0])
    others = [record for record in records if record is not first]
    titles = dict(zip(map(id, records), names or [record.title for record in records], strict=True))
    strange = sorted({other.workload for other in others} - {first.workload})
    if strange:
        raise BitwrightError(
            "the reports belong to different workloads",
            value=", ".join(map(repr, [first.workload, *strange])),
            fix="join runs of one workload; write a separate page for each of the others",
            code="different-workloads",
        )
    found: dict[str, Any] = {}
    for other in others:
        for name in _PARTS:
            if getattr(first, name) is None and name not in found and getattr(other, name) is not None:
                found[name] = getattr(other, name)
    there = {one.name for one in first.forecasts}
    more = [one for other in others for one in other.forecasts]
    found["forecasts"] = (*first.forecasts, *(one for one in more if one.name not in there))
    found["others"] = (
        *first.others,
        *(_row(other, titles[id(other)]) for other in others if other.accuracies or other.timings),
    )
    return first.model_copy(update={**found, "version": RECORD_VERSION})


def _row(record: Record, title: str) -> RunRow:
    timing = next((one for one in record.timings if one.variant == "quantized"), None)
    return RunRow(
        title=title,
        created=record.created,
        accuracy=own_accuracy(record) if record.accuracies else None,
        size=record.sizes[-1] if record.sizes else None,
        timing=timing,
    )


_WRITERS = {".html": write_html, ".json": write_json, ".md": write_markdown}


@strict
def report(runs: Any, path: str | Path) -> Record:
    """Write one page (.html, .md or .json) from results of one workload.

    `runs` is one or a list of: an output folder, a report.json file, or a result (`Quantized`, `Deployment`, `Tuned`,
    `Scores`, `Comparison`, `Prediction`, `Record`). The first run that quantized something is shown in full; the others
    add their sensitivity, tuning, training, runtimes and predictions, and a point in the plots of accuracy against
    latency and size.

    >>> import tempfile, torch, bitwright
    >>> batches = [torch.randn(16, 8)]
    >>> quantized = bitwright.quantize(torch.nn.Sequential(torch.nn.Linear(8, 4)), batches, name="tiny")
    >>> scores = bitwright.score(quantized.model, batches)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     record = bitwright.report([quantized, scores], f"{folder}/page.html")
    >>> record.title
    'tiny for onnxruntime'
    """
    _writer(path)  # before any file is read
    given = list(runs) if isinstance(runs, Iterable) and not isinstance(runs, str | BaseModel) else [runs]
    found = [_read(run) for run in given]
    workload = next((record.workload for _, record in found if record.workload), None) or _class_name(given) or "model"
    named = [(title, record if record.workload else _renamed(record, workload)) for title, record in found]
    record = join([record for _, record in named], [title for title, _ in named])
    write_page(record, path)
    return record


def write_page(record: Record, path: str | Path) -> Path:
    """Write a record as HTML, Markdown or JSON, by the suffix of `path`."""
    return Path(_writer(path)(record, path))


def _writer(path: str | Path) -> Any:
    writer = _WRITERS.get(Path(path).suffix)
    if writer is None:
        raise BitwrightError(
            "unknown kind of page",
            where=str(path),
            fix="end its name with .html, .md or .json",
            code="unknown-page-suffix",
        )
    return writer


def _read(run: Any) -> tuple[str, Record]:
    """A title for the run, and its record."""
    if isinstance(run, str | Path):
        place = Path(run)
        title = place.name if place.is_dir() or place.name != REPORT else place.parent.name
        return title, read_json(place / REPORT if place.is_dir() else place)
    record = _record(run)
    if record is None:
        raise BitwrightError(
            "this is not a result with a report",
            value=type(run).__name__,
            fix="give an output folder, or the result of quantize, deploy, tune, score, benchmark or predict",
            code="no-record",
        )
    return record.title, record


def _record(run: Any) -> Record | None:
    """The record of a result; its workload is empty if the result has no name."""
    match run:
        case Record():
            return run
        case Quantized():
            name = run.plan.model or ""
            return make_record(run, [run.example], workload=name, distance=run.distance, warnings=run.warnings)
        case Tuned():
            metric = next((name for name in run.outcome.metrics if name != "n"), "")
            return new_record(run.workload, seed=run.seed, tuning=tuning_record(run, metric))
        case Scores():
            return new_record("", sensitivity=sensitivity(run))
        case Comparison():
            return new_record(run.workload, comparison=run)
        case Prediction():
            devices = ", ".join(device.name for device in run.devices[:4])
            name = f"{1e3 * run.seconds:.3g} ms on {devices}"
            return new_record(run.model, forecasts=(forecast(run, name),))
    record = getattr(run, "record", None)
    return record if isinstance(record, Record) else None


def _renamed(record: Record, workload: str) -> Record:
    title = f"{workload} for {record.backend}" if record.sites else workload
    return record.model_copy(update={"workload": workload, "title": title})


def _class_name(runs: Iterable[Any]) -> str | None:
    """The class of the first quantized model, for results without a name."""
    return next((type(run.model).__name__ for run in runs if isinstance(run, Quantized)), None)


def write_row_report(row: FinishedRow, folder: Path) -> None:
    """Write the report of a row into a folder; registered as a row reporter."""
    write_report(row_record(row), folder)


def row_record(finished: FinishedRow) -> Record:
    """The record of a finished row."""
    task, result, trained = finished.task, finished.result, finished.trained
    workload, config = finished.workload, finished.config
    assert trained.quantized is not None
    assert result.executed is not None
    algorithm = task.algorithm.label
    record = make_record(
        trained.quantized,
        (),
        workload=workload.name,
        title=f"{task.model.label}: {algorithm} for {task.backend}, {task.bits} bits, seed {task.seed}",
        seed=task.seed,
        accuracies=_accuracies(result),
        sites=finished.sites,
    )
    usual = TrainConfig().model_dump()
    training = TrainingRecord(
        metric=workload.metric,
        precision=f"{algorithm}, {task.bits} bits",
        metrics=tuple(trained.metrics),
        best_epoch=None if trained.best is None else int(trained.best["epoch"]),
        steps=trained.steps,
        processes=1,
        config_hash=config.digest,
        settings={key: str(value) for key, value in config.model_dump().items() if value != usual[key]},
        init=f"float weights {result.start}",
        notes=tuple(trained.notes),
    )
    row = GridRow(
        id=task.key,
        config=task.grid(),
        executed=result.executed,
        device=result.device,
        beyond=result.beyond,
        notes=result.notes,
        start=result.start or "",
    )
    return record.model_copy(update={"backend": task.backend, "training": training, "row": row})


def _accuracies(result: Result) -> Iterator[Accuracy]:
    """Float, simulated and, if measured, on the runtime."""
    device = result.device
    found = {"float": result.float_accuracy, "simulated": result.accuracy}
    if device is not None:
        found[device.runtime] = device.accuracy
    for where, value in found.items():
        if value is not None:
            yield Accuracy(where=where, metric=result.metric or "", value=value, samples=result.samples)
