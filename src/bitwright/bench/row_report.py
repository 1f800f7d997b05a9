"""What a row of a grid leaves behind: a few figures of each site, and a whole report where a folder is given."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bitwright.bench.grid import RowTask
from bitwright.bench.leaderboard import Result, SiteFacts
from bitwright.documents import name_problem
from bitwright.errors import BitwrightError
from bitwright.report import Accuracy, GridRow, Record, SiteRow, Training, make_record, write_report
from bitwright.train import TrainConfig, TrainResult
from bitwright.workload import Workload, batches

_LOOKED_AT = 4  # batches: more would only smooth clipped shares and histograms


def report_folder(reports: Path, row: str) -> Path:
    """Where the report of a row is: a folder as other verbs make it, with `report.html` in it."""
    wrong = name_problem(row)
    if wrong is not None:
        raise BitwrightError(f"a row can't have this id: {wrong}", where="rows", value=row, code="unsafe-name")
    return reports / row


def write_row_report(record: Record, reports: Path) -> Path:
    """Write a row's report into its folder; gives the page's path."""
    assert record.row is not None
    return write_report(record, report_folder(reports, record.row.id))


def first_batches(workload: Workload) -> Iterator[Any]:
    """Inputs to look at sites with."""
    return batches(workload.calibration or (lambda: [workload.inputs]), _LOOKED_AT)


def site_facts(sites: Iterable[SiteRow]) -> tuple[SiteFacts, ...]:
    """Three digits of what a reader of a leaderboard wants to know of each site; biases follow from the others."""
    return tuple(
        SiteFacts(
            site=one.site,
            format=one.format,
            low=_short(one.low),
            high=_short(one.high),
            clipped=None if one.clipped is None else _short(one.clipped),
            sqnr_db=None if one.sqnr_db is None else round(one.sqnr_db, 1),
        )
        for one in sites
        if one.quantizer != "product"
    )


def _short(value: float) -> float:
    return float(f"{value:.3g}")


def row_record(task: RowTask, result: Result, trained: TrainResult, workload: Workload, config: TrainConfig) -> Record:
    """The record of a row that is done: its plan with reasons, ranges, accuracies, training, and what really ran."""
    assert trained.quantized is not None
    assert result.executed is not None
    algorithm = task.algorithm.label
    record = make_record(
        trained.quantized,
        first_batches(workload),
        workload=workload.name,
        title=f"{task.model.label}: {algorithm} for {task.backend}, {task.bits} bits, seed {task.seed}",
        seed=task.seed,
        accuracies=_accuracies(result),
    )
    usual = TrainConfig().model_dump()
    training = Training(
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
    """Float, simulated, and on the runtime where that was measured."""
    device = result.device
    found = {"float": result.float_accuracy, "simulated": result.accuracy}
    if device is not None:
        found[device.runtime] = device.accuracy
    for where, value in found.items():
        if value is not None:
            yield Accuracy(where=where, metric=result.metric or "", value=value, samples=result.samples)
