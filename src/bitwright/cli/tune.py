"""`bitwright tune`: search until the accuracy goal is met."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bitwright.cli.data import open_workload
from bitwright.cli.options import SamplesOption
from bitwright.cli.out import Out
from bitwright.cli.verb import CHECK_FAILED, verb
from bitwright.core.errors import BitwrightError

if TYPE_CHECKING:
    from bitwright.reports import Accuracy
    from bitwright.tuning import Goal, TuneConfig, Tuned
    from bitwright.tuning.baseline import Baseline


@verb(
    "tune",
    examples="""
    bitwright tune digits --drop 1% --minutes 10 -o digits-tuned
    bitwright tune config.yaml -o tuned
    bitwright tune config.yaml --workload my_workload.py:small --strategy tpe --trials 200 -o tuned
    bitwright tune digits -o tuned --resume
    bitwright tune digits -o tuned --store postgresql://user@host/bitwright --resume
    """,
)
def tune(
    out: Out,
    what: Annotated[str, typer.Argument(metavar="CONFIG|WORKLOAD", help="A YAML file, or a workload.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Output folder.", show_default=False)],
    workload: Annotated[
        str | None, typer.Option("--workload", help="The workload, if the file names none.", show_default=False)
    ] = None,
    drop: Annotated[
        str | None,
        typer.Option(help="Allowed loss: 1% of the float metric, or 0.5 in its units.", show_default=False),
    ] = None,
    lower_is_better: Annotated[
        bool, typer.Option("--lower-is-better", help="Smaller values of the metric are better.")
    ] = False,
    minutes: Annotated[float | None, typer.Option(min=0, help="Time to spend.", show_default=False)] = None,
    trials: Annotated[int | None, typer.Option(min=1, help="Candidates to try at most.", show_default=False)] = None,
    first: Annotated[bool, typer.Option("--first", help="Stop at the first model that passes.")] = False,
    strategy: Annotated[
        str | None, typer.Option(help="A name of `bitwright list strategies`.", show_default=False)
    ] = None,
    backend: Annotated[str | None, typer.Option(help="The target.", show_default=False)] = None,
    store: Annotated[
        str | None,
        typer.Option(
            help="Where trials are stored: a file, or postgresql://… (default: in -o).",
            show_default=False,
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the study in the store.", show_default=False)] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue or join an existing study; not needed for one in -o."),
    ] = False,
    seed: Annotated[int | None, typer.Option(min=0, help="Random seed.", show_default=False)] = None,
    samples: SamplesOption = None,
) -> None:
    """Find the fastest quantized model that loses no more than the goal allows; write it with a report.

    The whole budget is spent to find a faster one, unless --first is given. If no candidate meets the goal, the best
    one is written and the exit code is 1. After an interruption or a kill, rerun the same command: it resumes. Several
    processes, on several machines, can work on one study in PostgreSQL (--store, --resume), each with its own -o.
    """
    from bitwright.cli.tune_tables import missed, show_trial, show_tuned
    from bitwright.core.errors import WorkloadError
    from bitwright.core.interrupts import resumable
    from bitwright.reports import Size, new_record
    from bitwright.reports import write_report as write_files
    from bitwright.reports.sections import tuning_record
    from bitwright.tuning import TuneConfig
    from bitwright.workflows import finish, usable_runtimes
    from bitwright.workload import can_measure

    config = TuneConfig.load(what) if what.endswith((".yaml", ".yml")) else TuneConfig(workload=what)
    config = _changed(
        config, workload=workload, drop=drop, lower=lower_is_better, minutes=minutes, trials=trials, first=first
    )
    given: dict[str, Any] = {
        "strategy": strategy,
        "backend": backend,
        "store": store,
        "name": name,
        "seed": seed,
        "samples": samples,
    }
    config = config.model_copy(update={key: value for key, value in given.items() if value is not None})
    found = open_workload(out, config.workload) if config.workload is not None else None
    found = config.make_workload(found)
    if drop is not None and not can_measure(found):
        raise WorkloadError(
            "--drop needs a metric, and the workload has none",
            where=f"workload {found.name!r}",
            fix="give the Workload evaluation= or evaluate=, or leave --drop out: the model is quantized once",
        )
    runtimes = usable_runtimes(config.backend)
    float_size = sum(t.numel() * t.element_size() for t in found.model.state_dict().values())

    def report(tuned: Tuned, folder: Path) -> None:
        """Write the model and its report into the output folder."""
        if tuned.quantized is None:  # the float model is the best
            write_files(new_record(found.name, seed=config.seed, tuning=tuning_record(tuned, found.metric)), folder)
            return
        before = [] if tuned.baseline is None else [_accuracy(found.metric, tuned.baseline, tuned.goal)]
        size = Size(name="float weights", bytes=float_size)
        finish(
            found,
            tuned.quantized,
            folder,
            runtimes=runtimes,
            accuracies=before,
            float_size=size,
            seed=config.seed,
            tuning=tuning_record(tuned, found.metric),
            progress=progress,
        )

    kept = "all trials that were finished are kept; rerun the command to resume"
    if config.store is not None and not (resume or config.resume):
        kept = f"{kept}, with --resume"  # others may use that store
    with resumable(kept), out.progress() as progress:
        tuned = config.tune(
            found,
            output=output,
            resume=resume or config.resume or "auto",
            progress=progress,
            watch=lambda asked, baseline: show_trial(out, asked, baseline),
            on_result=report,
        )
    show_tuned(out, tuned, found.metric, output)
    if tuned.met_goal is False:
        out.stderr.print(f"the goal was missed by {missed(tuned, found.metric)}; the best model is in {output}")
        raise typer.Exit(CHECK_FAILED)


def _changed(
    config: TuneConfig,
    *,
    workload: str | None,
    drop: str | None,
    lower: bool,
    minutes: float | None,
    trials: int | None,
    first: bool,
) -> TuneConfig:
    """Apply the options to the settings of the file."""
    from pydantic import ValidationError

    from bitwright.tuning import Budget, Goal

    goal, budget = config.goal, config.budget
    try:
        said: dict[str, Any] = {"drop": drop, "lower_is_better": lower or None}
        said = {key: value for key, value in said.items() if value is not None}
        goal = Goal.model_validate({**goal.model_dump(exclude_unset=True), **said})
        limits = {"minutes": minutes, "trials": trials, "stop": "first" if first else None}
        budget = Budget.model_validate(
            {**budget.model_dump(), **{key: value for key, value in limits.items() if value is not None}}
        )
    except ValidationError as error:
        unreadable = any("drop" in one["loc"] for one in error.errors())
        raise BitwrightError(
            "the drop is neither a percentage nor a number" if unreadable else error.errors()[0]["msg"],
            where="--drop" if unreadable else "--minutes",
            value=drop if unreadable else minutes,
            fix="write --drop 1% (of float's metric), or --drop 0.5 (in its units)" if unreadable else "give more",
        ) from error
    return config.model_copy(update={"workload": workload or config.workload, "goal": goal, "budget": budget})


def _accuracy(metric: str, baseline: Baseline, goal: Goal) -> Accuracy:
    from bitwright.reports import Accuracy

    value, lower = baseline.metrics[metric], not goal.higher_is_better(metric)
    return Accuracy(where="float", metric=metric, value=value, samples=baseline.samples, lower_is_better=lower)
