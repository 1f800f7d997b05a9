"""`bitwright bench grid.yaml`: a grid of trainings, and its leaderboard."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from logging import WARNING, getLogger
from pathlib import Path

import typer

from bitwright.bench import GridConfig, Leaderboard, Told, run_grid
from bitwright.bench.leaderboard import (
    Summary,
    comparable,
    drop_reference,
    reasons,
    short_reason,
    spread_text,
    summary,
)
from bitwright.bench.rows import report_folder
from bitwright.cli.out import Out
from bitwright.cli.verb import CHECK_FAILED
from bitwright.core.errors import BitwrightError
from bitwright.core.files import write_text
from bitwright.core.formatting import counted
from bitwright.core.output_folder import replacing_with_siblings
from bitwright.report.leaderboard_markdown import markdown

SUFFIXES = (".yaml", ".yml")


def run(
    out: Out,
    file: Path,
    *,
    workload: str | None,
    attempts: int | None,
    starts: Path | None,
    show: bool,
    output: Path | None,
    reports: Path | None,
) -> None:
    """Run what isn't known yet, and show all that is."""
    if output is not None and output.suffix != ".json":
        raise BitwrightError("a leaderboard is kept as JSON", where="--output", value=str(output), fix="-o board.json")
    config = GridConfig.load(file, workload=workload)
    if attempts is not None:
        config = config.model_copy(update={"attempts": attempts})
    for note in config.notes:
        out.note(note)
    with out.units() as progress, quiet_training():

        def watch(told: Told) -> None:
            task, result = told.task, told.result
            name = f"{task.model.label}, {task.algorithm.label}, {task.backend}, {task.bits} bits, seed {task.seed}"
            progress(name, told.done, told.total)
            if result.status in ("failed", "diverged"):
                out.note(f"{name}: {result.status}: {result.reason}")

        board = run_grid(config, starts=starts, reports=reports, watch=watch, work=not show)
    files = []
    if output is not None:
        with replacing_with_siblings(output) as temporary:  # both or none
            board.save(temporary)
            write_text(temporary.with_suffix(".md"), markdown(board))
        files = [output, output.with_suffix(".md")]
    _show(out, board, files)
    if reports is not None:
        _tell_reports(out, board, reports, output)
    states = {row.status for row in board.rows}
    if states & {"failed", "pending"} or states == {"refused"}:
        raise typer.Exit(CHECK_FAILED)


@contextmanager
def quiet_training() -> Iterator[None]:
    """A training says what it decides for its user; rows keep that, and hundreds of such lines would hide the rest."""
    log = getLogger("bitwright.training")
    level = log.level
    log.setLevel(WARNING)
    try:
        yield
    finally:
        log.setLevel(level)


def _show(out: Out, board: Leaderboard, files: list[Path]) -> None:
    out.data(board.model_dump(mode="json", by_alias=True))
    cells = [s for s in board.summaries if None not in (s.algorithm, s.backend, s.bits, s.model)]
    many = len(board.rows) > 60
    shown = list(_overall(board)) if many else cells
    heads = ["algorithm", "backend", "#bits", "model", "#accuracy", "#below float", "#on the runtime", "rows"]
    out.table(heads, map(_cells, shown), title=board.title or board.name)
    for what, algorithm, backend, reason, count in reasons(board.rows):
        out.say(f"{what}: {algorithm}, {backend}, {counted(count, 'row')}: {short_reason(reason)}")
    states = [row.status for row in board.rows]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    out.say(f"{counted(len(states), 'row')}: {counts}; config {board.config_hash}")
    out.say(f"“below float” is below {drop_reference(board)}")
    for path in files:
        out.say(f"  {path}")


def _overall(board: Leaderboard) -> Iterator[Summary]:
    """Each algorithm at each width, over places that all algorithms have; all of its states beside it."""
    shared = comparable(board.rows)
    for one in board.summaries:
        if one.backend is one.model is None:
            own = [row for row in shared if (row.algorithm, row.bits) == (one.algorithm, one.bits)]
            found = summary(own, algorithm=one.algorithm, bits=one.bits)
            yield found.model_copy(update={"rows": one.rows})


def _tell_reports(out: Out, board: Leaderboard, reports: Path, output: Path | None) -> None:
    """How many rows have a report, and how the others get one: what is known doesn't run twice."""
    done = [row for row in board.rows if row.status == "done"]
    missing = [row for row in done if not (report_folder(reports, row.id) / "report.html").is_file()]
    out.say(f"{len(done) - len(missing)} of {len(done)} rows that are done have a report in {reports}")
    if missing:
        command = f"bitwright bench {output or 'leaderboard.json'} --row {missing[0].id} --reports {reports}"
        out.note(f"the others ran elsewhere, or before: {command}")


def _cells(one: Summary) -> tuple[str, ...]:
    states = ", ".join(f"{count} {state}" for state, count in one.rows.items())
    gap = "" if one.gap is None else f"{one.gap.mean:+.2f}"
    return (
        one.algorithm or "all",
        one.backend or "all",
        str(one.bits or "all"),
        one.model or "all",
        spread_text(one.accuracy) if one.model else "",
        spread_text(one.drop),
        gap,
        states,
    )
