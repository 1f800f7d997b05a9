"""Rows of a leaderboard, run again from what the file says of them: the same numbers, and a whole report of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bitwright.bench.float_networks import Starts
from bitwright.bench.grid import GridConfig, RowTask
from bitwright.bench.leaderboard import Leaderboard, Result, Row
from bitwright.bench.machine import machine, other_instructions
from bitwright.bench.rows import RowOutcome, gave_up, report_folder, run_row
from bitwright.core.arguments import strict
from bitwright.core.errors import BitwrightError, PlanError, Problem, did_you_mean
from bitwright.core.files import scratch_folder
from bitwright.core.task_store import open_study


@dataclass(frozen=True, kw_only=True)
class Again:
    """A row as the leaderboard has it, and as it came out now."""

    row: Row
    result: Result
    report: Path | None
    """Its page; None: no folder was given, or the row isn't done."""

    @property
    def differences(self) -> list[str]:
        """What isn't as it was; empty if it is the same to the last image."""
        before, now = self.row, self.result
        pairs = {
            "status": (before.status, now.status),
            "accuracy": (before.accuracy, now.accuracy),
            "float weights": (before.start, now.start),
        }
        if before.device is not None and now.device is not None:
            pairs[f"accuracy on {now.device.runtime}"] = (before.device.accuracy, now.device.accuracy)
        return [f"{name} was {was}, is {now}" for name, (was, now) in pairs.items() if was != now]


@strict
def run_again(
    board: Leaderboard,
    rows: Sequence[str],
    *,
    reports: str | Path | None = None,
    starts: str | Path | None = None,
    workload: str | None = None,
    watch: Callable[[Again], None] | None = None,
) -> list[Again]:
    """Run rows, named by their ids or how these begin, from their configs and seeds; the leaderboard stays as it is.

    Reports go into the folder `reports`. `starts` keeps float networks for later calls, else they are trained again.
    `workload` says where the code of the rows' model is, if it was moved.
    """
    tasks = [(row, _task(board, row, workload)) for row in find_rows(board, rows)]
    place = None if reports is None else Path(reports)
    found = []
    with scratch_folder() as temporary:
        study = open_study(None, "again", {}, resume=True, kind=RowOutcome, gave_up=gave_up)
        try:
            floats = Starts(temporary if starts is None else Path(starts), study)
            floats.check([task for _, task in tasks])
            for row, task in tasks:
                result = run_row(task, floats, reports=place)
                done = place is not None and result.status == "done"
                report = report_folder(place, row.id) / "report.html" if place is not None and done else None
                found.append(Again(row=row, result=result, report=report))
                if watch is not None:
                    watch(found[-1])
        finally:
            study.close()
    return found


def ran_elsewhere(board: Leaderboard, row: Row) -> str | None:
    """What must be set in the environment for a row to come out the same here; None: nothing that is known of."""
    was = board.machines.get(row.machine or "")
    return None if was is None else other_instructions(was, machine())


def find_rows(board: Leaderboard, wanted: Sequence[str]) -> list[Row]:
    """Rows by their ids, or by how an id begins; all problems at once."""
    found: dict[str, Row] = {}
    problems = []
    for name in wanted:
        own = [row for row in board.rows if row.id.startswith(name)]
        if len(own) == 1:
            found[own[0].id] = own[0]
        elif own:
            some = ", ".join(row.id for row in own[:3])
            problems.append(Problem(what=f"{len(own)} rows begin so", value=name, fix=f"give more of it: {some} …"))
        else:
            fix = did_you_mean(name, [row.id for row in board.rows])
            problems.append(Problem(what="the leaderboard has no such row", value=name, fix=fix))
    if problems:
        raise PlanError(problems, title=f"rows of {board.name} can't be found")
    return list(found.values())


def _task(board: Leaderboard, row: Row, workload: str | None) -> RowTask:
    """The row's settings, with files where the grid found them."""
    model = {**row.config["models"][0], "workload": _workload(board, row, workload)}
    data = {**row.config, "models": [model], "backends": [row.backend]}
    (task,) = GridConfig.parse(data, where=f"row {row.id}", folder=Path()).tasks()
    if task.key != row.id:
        raise BitwrightError(
            "the settings of this row have another hash now",
            where=row.id,
            value=task.key,
            fix="run it with the workload and the version of Bitwright that made it (`machines` in the file)",
        )
    return task


def _workload(board: Leaderboard, row: Row, given: str | None) -> str:
    ref = str(row.config["models"][0]["workload"])
    if ".py:" not in ref:
        return ref
    used = next((m["workload"] for m in board.config.get("models", []) if m.get("name") == row.model), ref)
    where = given or str(used)
    if not Path(where.rpartition(":")[0]).is_file():
        raise BitwrightError(
            "the file of the row's workload isn't there",
            where=row.id,
            value=where,
            fix=f"say where it is: --workload FOLDER/{ref}",
        )
    return where
