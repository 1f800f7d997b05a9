"""Run a grid: every row once, by any number of processes, however often they are killed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path
from typing import TypeAlias

from bitwright.bench.float_networks import Starts
from bitwright.bench.grid import GridConfig, RowTask
from bitwright.bench.leaderboard import FloatNet, Leaderboard, Result, Row, summaries
from bitwright.bench.machine import Machine, machine
from bitwright.bench.rows import RowOutcome, gave_up, one_line, run_row, train_float_on
from bitwright.core.addresses import is_address
from bitwright.core.arguments import strict
from bitwright.core.errors import UserCodeError, WorkloadError
from bitwright.core.files import disk_error, fingerprint
from bitwright.core.interrupts import Interrupted, current_stop, safe_point
from bitwright.core.task_store import Study, open_study

progress_log = getLogger("bitwright.progress")
GridStudy: TypeAlias = Study[RowTask, RowOutcome]
_WAIT = 0.5  # seconds between looks at what another worker does


@dataclass(frozen=True, kw_only=True)
class Told:
    """A row that has just ended here, and where the grid stands."""

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
    watch: Callable[[Told], None] | None = None,
    work: bool = True,
) -> Leaderboard:
    """Run what isn't known yet, and give all that is.

    A grid goes on where it was left; processes with the same store share the work. `starts` is the folder for float
    networks (by default beside the store, or in the current folder if that is a server). Rows that are done here
    leave their reports in the folder `reports`. `watch` is told of each row that ends here. Without `work` nothing is
    run.
    """
    study = open_grid(config)
    try:
        if work:
            folder = Path(starts) if starts is not None else _beside(config)
            floats = Starts(folder, study)
            floats.check([task for task in config.tasks() if study.known(task) is None])
            try:
                _work(config, study, floats, watch or (lambda _: None), Path(reports) if reports is not None else None)
                _train_floats_on(config, study, floats)
            except Interrupted as error:  # its own words are about one training
                kept = "all rows that were finished are kept; rerun the command to resume"
                raise Interrupted(error.cause, kept) from None
        return assemble(config, study)
    finally:
        study.close()


def open_grid(config: GridConfig) -> GridStudy:
    """The grid's study. Rows carry all their settings, so a grid may grow; rows that are no more asked for stay."""
    store = config.store or f"{config.name}.db"
    return open_study(store, config.name, {"grid": config.version}, resume=True, kind=RowOutcome, gave_up=gave_up)


def _beside(config: GridConfig) -> Path:
    store = config.store or f"{config.name}.db"
    return Path(f"{config.name}.starts") if is_address(store) else Path(store).with_suffix(".starts")


def _work(
    config: GridConfig, study: GridStudy, starts: Starts, watch: Callable[[Told], None], reports: Path | None
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
                left.append(task)  # another worker is at it, or it is tried again when the others are done
            else:
                done += 1
            if result is not None:
                watch(Told(task=task, result=result, done=done, total=len(tasks)))
        if len(left) == len(todo):
            time.sleep(_WAIT)
        todo = left


def _train_floats_on(config: GridConfig, study: GridStudy, starts: Starts) -> None:
    """What the rows' training alone does to the float networks: once each, known to all workers."""
    for task in {(task.model.label, task.seed): task for task in config.tasks()}.values():
        if study.recall(_float_name(task)) is not None:
            continue
        start = starts(task)
        try:
            trained_on = train_float_on(task, start)
        except Exception as error:  # rows have said it; a number for comparison isn't worth the leaderboard
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


def _attempt(study: GridStudy, task: RowTask, starts: Starts, reports: Path | None) -> RowOutcome | None:
    claim = study.claim(task)
    if claim is None:
        return None
    try:
        with study.heartbeats(claim):
            try:
                outcome = run_row(task, starts, reports=reports)
            except Exception as error:  # one row must not end all
                if isinstance(error, WorkloadError) and not isinstance(error, UserCodeError):
                    raise  # no row of it can be run: not this row's fault
                if current_stop().received:
                    raise
                if (refused := disk_error(error)) is not None:
                    raise refused from error  # it says nothing about the row
                outcome = RowOutcome(status="failed", reason=one_line(error), environment=machine())
    except BaseException:
        study.release(claim)
        raise
    if outcome.status == "failed":
        study.fail(claim, outcome)
    else:
        study.finish(claim, outcome)
        progress_log.debug("row finished: %s", task.key)
        if study.known(task) is None:  # we were taken for dead: another worker has the row now
            return None
    return outcome


def assemble(config: GridConfig, study: GridStudy) -> Leaderboard:
    """The leaderboard of what is known now."""
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
    """Accuracies of float networks that were trained on as rows are: of all or of none, to compare like with like."""
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
