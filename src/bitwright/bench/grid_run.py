"""Run the rows of a grid, in any number of processes, and rerun rows of a leaderboard."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path
from typing import Any, TypeAlias

from bitwright.bench.float_networks import FloatNetworks
from bitwright.bench.grid import GridConfig, RowTask, is_file, settings_file
from bitwright.bench.grid_row import (
    RowOutcome,
    gave_up,
    one_line,
    quiet_training,
    report_folder,
    run_row,
    train_float_on,
)
from bitwright.bench.leaderboard import FloatNet, Leaderboard, Result, Row, summaries
from bitwright.core.arguments import strict
from bitwright.core.display import Progress
from bitwright.core.environment import Machine, machine, other_instructions, revision
from bitwright.core.errors import BitwrightError, PlanError, Problem, UserCodeError, WorkloadError, did_you_mean
from bitwright.core.files import disk_error, fingerprint, scratch_folder
from bitwright.core.interrupts import Interrupted, current_stop, safe_point
from bitwright.core.task_store import Study, is_address, open_study

progress_log = getLogger("bitwright.progress")
GridStudy: TypeAlias = Study[RowTask, RowOutcome]
_WAIT = 0.5  # seconds between checks of another worker's progress


@dataclass(frozen=True, kw_only=True)
class RowProgress:
    """A row that has just ended in this process, and the progress of the grid."""

    task: RowTask
    result: Result
    done: int
    total: int


@strict
def run_grid(
    config: GridConfig,
    *,
    starts: str | Path | None = None,
    reports: str | Path | None = None,
    watch: Callable[[RowProgress], None] | None = None,
    progress: Progress | None = None,
    work: bool = True,
) -> Leaderboard:
    """Run the rows of a grid that have no result yet, and return the leaderboard.

    A grid resumes where it stopped. Processes with the same store share the work. `starts` is the folder of the float
    networks (by default in the folder of the store, or in the current folder if the store is a server). Rows that end
    in this process write their reports into the folder `reports`, and `watch` is called for each of them. `progress` is
    called with the number of rows that are done. With ``work=False`` nothing is run.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     config = GridConfig(
    ...         models=["digits"], algorithms=["lsq", "pact"], backends=["academic"], bits=[4], store=f"{folder}/a.db"
    ...     )
    ...     run_grid(config, work=False)  # training the rows takes a minute
    <Leaderboard grid: 0 of 2 rows done>
    """

    def tell(row: RowProgress) -> None:
        if progress is not None:
            progress(row.done, row.total, row.task.label)
        if row.result.status in ("failed", "diverged"):
            progress_log.info("%s: %s: %s", row.task.label, row.result.status, row.result.reason)
        if watch is not None:
            watch(row)

    for note in config.notes:
        progress_log.info("%s", note)
    study = open_grid(config)
    try:
        if work:
            folder = Path(starts) if starts is not None else _default_folder(config)
            floats = FloatNetworks(folder, study)
            floats.check([task for task in config.tasks() if study.known(task) is None])
            try:
                with quiet_training():
                    _work(config, study, floats, tell, Path(reports) if reports is not None else None)
                    _train_floats_on(config, study, floats)
            except Interrupted as error:  # the message of the training is about one row only
                kept = "finished rows are saved; rerun the command to resume"
                raise Interrupted(error.cause, kept) from None
        board = assemble(config, study)
        if reports is not None:
            _log_reports(board, Path(reports))
        return board
    finally:
        study.close()


def _log_reports(board: Leaderboard, reports: Path) -> None:
    """Log how many rows have a report, and the command that writes the others."""
    done = [row for row in board.rows if row.status == "done"]
    missing = [row for row in done if not (report_folder(reports, row.id) / "report.html").is_file()]
    progress_log.info("%d of %d finished rows have a report in %s", len(done) - len(missing), len(done), reports)
    if missing:
        command = f"bitwright grid rerun leaderboard.json --row {missing[0].id} --reports {reports}"
        progress_log.info("to write the others: %s", command)


def open_grid(config: GridConfig) -> GridStudy:
    """The study of a grid. Rows are stored with all their settings, so rows can be added to a grid or removed."""
    store = config.store or f"{config.name}.db"
    return open_study(store, config.name, {"grid": config.version}, resume=True, kind=RowOutcome, gave_up=gave_up)


def _default_folder(config: GridConfig) -> Path:
    store = config.store or f"{config.name}.db"
    return Path(f"{config.name}.starts") if is_address(store) else Path(store).with_suffix(".starts")


def _work(
    config: GridConfig,
    study: GridStudy,
    starts: FloatNetworks,
    watch: Callable[[RowProgress], None],
    reports: Path | None,
) -> None:
    tasks = config.tasks()
    todo, done = tasks, 0
    while todo:
        left = []
        for task in todo:
            safe_point()
            if study.known(task) is not None or len(study.failures(task)) >= config.attempts:
                done += 1
                continue
            result = _attempt(study, task, starts, reports)
            if result is None or (result.status == "failed" and len(study.failures(task)) < config.attempts):
                left.append(task)  # another worker runs it, or it is tried again after the others
            else:
                done += 1
            if result is not None:
                watch(RowProgress(task=task, result=result, done=done, total=len(tasks)))
        if len(left) == len(todo):
            time.sleep(_WAIT)
        todo = left


def _train_floats_on(config: GridConfig, study: GridStudy, starts: FloatNetworks) -> None:
    """Train each float network as long as a row, once for all workers, to separate the effect of the training."""
    for task in {(task.model.label, task.seed): task for task in config.tasks()}.values():
        if study.recall(_float_name(task)) is not None:
            continue
        start = starts(task)
        try:
            trained_on = train_float_on(task, start)
        except Exception as error:  # rows report the same error; a reference value must not end the grid
            if current_stop().received or disk_error(error) is not None:
                raise
            trained_on = None
        study.keep(
            _float_name(task),
            FloatNet(
                model=task.model.label,
                seed=task.seed,
                accuracy=start.accuracy,
                trained_on=trained_on,
                start=start.fingerprint,
            ).model_dump(mode="json"),
        )


def _float_name(task: RowTask) -> str:
    return f"float:{task.model.label}:{task.seed}:{fingerprint(repr((task.start, task.training, task.threads)))}"


def _attempt(study: GridStudy, task: RowTask, starts: FloatNetworks, reports: Path | None) -> RowOutcome | None:
    claim = study.claim(task)
    if claim is None:
        return None
    try:
        with study.heartbeats(claim):
            try:
                outcome = run_row(task, starts, reports=reports)
            except Exception as error:  # a row that fails must not end the grid
                if isinstance(error, WorkloadError) and not isinstance(error, UserCodeError):
                    raise  # affects all rows of the workload
                if current_stop().received:
                    raise
                if (refused := disk_error(error)) is not None:
                    raise refused from error  # unrelated to the row
                outcome = RowOutcome(status="failed", reason=one_line(error), environment=machine())
    except BaseException:
        study.release(claim)
        raise
    if outcome.status == "failed":
        study.fail(claim, outcome)
    else:
        study.finish(claim, outcome)
        progress_log.debug("row finished: %s", task.key)
        if study.known(task) is None:  # the heartbeat was lost, and another worker has taken the row
            return None
    return outcome


def assemble(config: GridConfig, study: GridStudy) -> Leaderboard:
    """The leaderboard of all results so far."""
    machines: dict[str, Machine] = {}
    floats = _floats(config, study)
    trained = _trained(config, floats)
    rows = tuple(_row(task, study, machines, trained) for task in config.tasks())
    return Leaderboard(
        name=config.name,
        title=config.title,
        config_hash=config.digest,
        config=config.model_dump(mode="json", by_alias=True, exclude={"store"}),
        machines=machines,
        floats=floats,
        drops_from="trained" if trained else "start",
        rows=rows,
        summaries=summaries(rows),
    )


def _floats(config: GridConfig, study: GridStudy) -> tuple[FloatNet, ...]:
    names = dict.fromkeys(map(_float_name, config.tasks()))
    return tuple(FloatNet.model_validate(known) for name in names if (known := study.recall(name)) is not None)


def _trained(config: GridConfig, floats: Sequence[FloatNet]) -> dict[tuple[str, int], float]:
    """Accuracies of the float networks after the training of a row; empty unless all of them are known."""
    found = {(one.model, one.seed): one.trained_on for one in floats if one.trained_on is not None}
    wanted = {(task.model.label, task.seed) for task in config.tasks()}
    return found if wanted <= found.keys() else {}


def _row(
    task: RowTask, study: GridStudy, machines: dict[str, Machine], trained: Mapping[tuple[str, int], float]
) -> Row:
    failures = study.failures(task)
    known = study.known(task)
    outcome = known or (failures[-1] if failures else RowOutcome(status="pending"))
    where = None
    if outcome.environment is not None:
        where = fingerprint(outcome.environment.model_dump_json())[:8]
        machines[where] = outcome.environment
    return Row(
        id=task.key,
        model=task.model.label,
        algorithm=task.algorithm.label,
        w_method=task.algorithm.weights,
        a_method=task.algorithm.a_method,
        backend=task.backend,
        bits=task.bits,
        seed=task.seed,
        attempts=len(failures) + (known is not None),
        machine=where,
        config=task.grid(),
        float_trained=trained.get((task.model.label, task.seed)) if outcome.accuracy is not None else None,
        **{name: getattr(outcome, name) for name in Result.model_fields},
    )


@dataclass(frozen=True, kw_only=True)
class Rerun:
    """A row of a leaderboard with its new result."""

    row: Row
    result: Result
    report: Path | None
    """The report's page; None if there is no folder for reports, or if the row isn't done."""

    @property
    def differences(self) -> list[str]:
        """The values that differ from the leaderboard; empty if all are identical."""
        before, now = self.row, self.result
        pairs = {
            "status": (before.status, now.status),
            "accuracy": (before.accuracy, now.accuracy),
            "float weights": (before.start, now.start),
        }
        if before.device is not None and now.device is not None:
            pairs[f"accuracy on {now.device.runtime}"] = (before.device.accuracy, now.device.accuracy)
        return [f"{name} was {was}, is {now}" for name, (was, now) in pairs.items() if was != now]

    def cells(self) -> Sequence[object]:
        """The row of a table."""
        both = (self.row, self.result)
        before, now = (one.status if one.accuracy is None else f"{one.accuracy:.2f}" for one in both)
        return self.row.id, self.row.label, before, now, "no" if self.differences else "yes"

    def to_dict(self) -> dict[str, Any]:
        """The results before and now as plain data."""
        return {
            "id": self.row.id,
            "was": self.row.accuracy,
            "accuracy": self.result.accuracy,
            "status": self.result.status,
            "differences": self.differences,
            "report": None if self.report is None else str(self.report),
        }


@strict
def rerun_rows(
    board: Leaderboard,
    rows: Sequence[str],
    *,
    reports: str | Path | None = None,
    starts: str | Path | None = None,
    workload: str | None = None,
    progress: Progress | None = None,
) -> list[Rerun]:
    """Run rows of a leaderboard again, from their configs and seeds. The leaderboard is not changed.

    `rows` are ids, or their first characters. Reports are written into the folder `reports`. `starts` is a folder that
    keeps the float networks for later calls; without it they are trained again. `workload` is the new place of the
    rows' workload file, if it was moved.

    TensorRT has no 4-bit format, so this row is refused:

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     config = GridConfig(
    ...         models=["digits-untrained"],
    ...         algorithms=["lsq"],
    ...         backends=["tensorrt"],
    ...         bits=[4],
    ...         store=f"{folder}/grid.db",
    ...     )
    ...     board = run_grid(config, work=False)
    >>> [rerun] = rerun_rows(board, [board.rows[0].id[:8]])
    >>> rerun.result.status, rerun.differences
    ('refused', ['status was pending, is refused'])
    """
    tasks = [(row, _task(board, row, workload)) for row in find_rows(board, rows)]
    _log_other_machines(board, [row for row, _ in tasks])
    place = None if reports is None else Path(reports)
    found = []
    with scratch_folder() as temporary, quiet_training():
        study = open_study(None, "again", {}, resume=True, kind=RowOutcome, gave_up=gave_up)
        try:
            floats = FloatNetworks(temporary if starts is None else Path(starts), study)
            floats.check([task for _, task in tasks])
            for number, (row, task) in enumerate(tasks):
                if progress is not None:
                    progress(number, len(tasks), row.label)
                result = run_row(task, floats, reports=place)
                done = place is not None and result.status == "done"
                report = report_folder(place, row.id) / "report.html" if place is not None and done else None
                found.append(Rerun(row=row, result=result, report=report))
        finally:
            study.close()
    if any(one.differences for one in found):
        known = [board.machines[row.machine] for row, _ in tasks if row.machine in board.machines]
        made = sorted({one.revision or "unknown" for one in known}) or ["unknown"]
        progress_log.info("the rows were made by revision %s; this is %s", ", ".join(made), revision() or "unknown")
        if not any(ran_elsewhere(board, row) for row, _ in tasks):
            progress_log.info("another CPU or torch version rounds differently; compare with `machines` in the file")
    return found


def _log_other_machines(board: Leaderboard, rows: Sequence[Row]) -> None:
    """Log which rows ran with other instructions, and what to set in the environment."""
    advice: dict[str, list[str]] = {}
    for row in rows:
        text = ran_elsewhere(board, row)
        if text is not None:
            advice.setdefault(text, []).append(row.id)
    for text, own in advice.items():
        progress_log.info("%s%s: %s", ", ".join(own[:3]), " …" if len(own) > 3 else "", text)


def ran_elsewhere(board: Leaderboard, row: Row) -> str | None:
    """The environment variables that a row needs for the same result here; None if no difference is known."""
    was = board.machines.get(row.machine or "")
    return None if was is None else other_instructions(was, machine())


def find_rows(board: Leaderboard, wanted: Sequence[str]) -> list[Row]:
    """Rows by their ids or the first characters of their ids. All problems are reported at once."""
    found: dict[str, Row] = {}
    problems = []
    for name in wanted:
        own = [row for row in board.rows if row.id.startswith(name)]
        if len(own) == 1:
            found[own[0].id] = own[0]
        elif own:
            some = ", ".join(row.id for row in own[:3])
            what, fix = f"{len(own)} rows have an id that starts like this", f"give more characters: {some} …"
            problems.append(Problem(what=what, value=name, fix=fix, code="ambiguous-row"))
        else:
            fix = did_you_mean(name, [row.id for row in board.rows])
            problems.append(Problem(what="the leaderboard has no such row", value=name, fix=fix, code="unknown-row"))
    if problems:
        raise PlanError(problems, title=f"{board.name} does not have these rows")
    return list(found.values())


def _task(board: Leaderboard, row: Row, workload: str | None) -> RowTask:
    """The task of a row, with the files of its grid."""
    model = {**row.config["models"][0], "workload": _workload(board, row, workload)}
    data = {**row.config, "models": [model], "backends": [row.backend]}
    (task,) = GridConfig.parse(data, where=f"row {row.id}", folder=Path()).tasks()
    if task.key != row.id:
        raise BitwrightError(
            "the hash of this row's settings has changed",
            where=row.id,
            value=task.key,
            fix="use the workload and the version of Bitwright that made it (`machines` in the file)",
            code="row-changed",
        )
    return task


def _workload(board: Leaderboard, row: Row, given: str | None) -> str:
    ref = str(row.config["models"][0]["workload"])
    if not is_file(ref):
        return ref
    used = next((m["workload"] for m in board.config.get("models", []) if m.get("name") == row.model), ref)
    where = given or str(used)
    if not Path(settings_file(where) or where.rpartition(":")[0]).is_file():
        raise BitwrightError(
            "the file of the row's workload does not exist",
            where=row.id,
            value=where,
            fix=f"give its path: --workload FOLDER/{ref}",
            code="workload-file-missing",
        )
    return where
