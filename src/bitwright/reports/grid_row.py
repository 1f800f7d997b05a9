"""The report of one row of a grid: plan with reasons, ranges, accuracies, training, and what was executed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bitwright.bench.comparison import Accuracy
from bitwright.bench.leaderboard import Result
from bitwright.bench.rows import FinishedRow
from bitwright.reports.files import write_report
from bitwright.reports.record import GridRow, Record, make_record
from bitwright.reports.sections import TrainingRecord
from bitwright.training import TrainConfig


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
