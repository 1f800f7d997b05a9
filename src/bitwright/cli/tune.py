"""`bitwright tune`: search until the goal holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from bitwright.cli.data import open_workload
from bitwright.cli.options import SamplesOption
from bitwright.cli.out import Out
from bitwright.cli.verb import CHECK_FAILED, verb
from bitwright.core import formatting
from bitwright.core.errors import BitwrightError, WorkloadError
from bitwright.core.interrupts import resumable
from bitwright.core.output_folder import visible_files
from bitwright.deployment import finish, usable_runtimes
from bitwright.report import Accuracy, Size, new_record
from bitwright.report import write_report as write_files
from bitwright.report.tuning import tuning_record
from bitwright.tuning import Budget, Goal, TuneConfig, Tuned
from bitwright.tuning.baseline import Baseline
from bitwright.tuning.search import Asked
from bitwright.workload import can_measure

_SHOWN = 12  # trials in the table at the end


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
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for what is made.", show_default=False)],
    workload: Annotated[
        str | None, typer.Option("--workload", help="Whose model and data, if the file names none.", show_default=False)
    ] = None,
    drop: Annotated[
        str | None,
        typer.Option(help="What may be lost: 1% of float's metric, or 0.5 of its units.", show_default=False),
    ] = None,
    lower_is_better: Annotated[
        bool, typer.Option("--lower-is-better", help="Less of the metric is better; workloads can say so themselves.")
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
            help="Where trials are kept: a file, or postgresql://… (default: in the output folder).", show_default=False
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Of the study in the store.", show_default=False)] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue or join a study that exists; an unfinished one in -o needs no flag."),
    ] = False,
    seed: Annotated[int | None, typer.Option(min=0, help="Of all random numbers.", show_default=False)] = None,
    samples: SamplesOption = None,
) -> None:
    """Find the fastest quantized model that loses no more than the goal allows; write it with a report.

    The whole budget is spent to find a faster one, unless --first is given. If no candidate meets the goal, the best
    one is written and the exit code is 1. After an interruption or a kill, rerun the same command: it resumes. Several
    processes, on several machines, can work on one study in PostgreSQL (--store, --resume), each with its own -o.
    """
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
            "nothing says how good the model is, so there is no drop to hold",
            where=f"workload {found.name!r}",
            fix="give the Workload evaluation= or evaluate=, or leave --drop out: the model is quantized once",
        )
    runtimes = usable_runtimes(config.backend)
    float_size = sum(t.numel() * t.element_size() for t in found.model.state_dict().values())

    def report(tuned: Tuned, folder: Path) -> None:
        """Into the folder that becomes the output: the model and its report appear together."""
        if tuned.quantized is None:  # float is the best: there is a search to tell of, but no quantized model
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
        kept = f"{kept}, with --resume"  # others may use that store: nothing in it is continued by surprise
    with resumable(kept), out.progress() as progress:
        tuned = config.tune(
            found,
            output=output,
            resume=resume or config.resume or "auto",
            progress=progress,
            watch=lambda asked, baseline: _tell(out, asked, baseline),
            on_result=report,
        )
    _show(out, tuned, found.metric, output)
    if tuned.met_goal is False:
        out.stderr.print(f"the goal was missed by {_missed(tuned, found.metric)}; the best model is in {output}")
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
    """What the command line says counts before the file."""
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
            "this says neither a share nor a number" if unreadable else error.errors()[0]["msg"],
            where="--drop" if unreadable else "--minutes",
            value=drop if unreadable else minutes,
            fix="write --drop 1% (of float's metric), or --drop 0.5 (in its units)" if unreadable else "give more",
        ) from error
    return config.model_copy(update={"workload": workload or config.workload, "goal": goal, "budget": budget})


def _accuracy(metric: str, baseline: Baseline, goal: Goal) -> Accuracy:
    value, lower = baseline.metrics[metric], not goal.higher_is_better(metric)
    return Accuracy(where="float", metric=metric, value=value, samples=baseline.samples, lower_is_better=lower)


def _tell(out: Out, asked: Asked, baseline: Baseline) -> None:
    """One line for each candidate, as it comes."""
    outcome = asked.outcome
    if outcome.failed is not None:
        verdict = f"failed: {outcome.failed.splitlines()[0]}"
    else:
        figures = ", ".join(f"{k} {v:.4g}" for k, v in outcome.metrics.items() if k != "n")
        about = "about " if outcome.stopped else ""
        speed = "" if outcome.latency_ratio is None else f", {outcome.latency_ratio:.2f}× latency"
        verdict = f"{'passes' if outcome.passed else 'fails'}: {about}{figures}{speed}"
        verdict += "".join(f", {limit}" for limit in outcome.exceeded)
    known = "" if asked.fresh else " (known)"
    out.say(f"{asked.number + 1:4d}  {verdict}  {asked.candidate}{known}")


def _missed(tuned: Tuned, metric: str) -> str:
    outcome = tuned.outcome
    if outcome.exceeded:
        return "; ".join(outcome.exceeded)
    if tuned.baseline is None or metric not in outcome.metrics:
        return outcome.failed or "all"
    goal = tuned.goal
    gaps = {
        name: goal.margin(name, tuned.baseline.metrics[name], outcome.metrics[name]) for name in goal.metrics(metric)
    }
    return ", ".join(f"{-gap:.4g} {name}" for name, gap in gaps.items() if gap < 0)


def _show(out: Out, tuned: Tuned, metric: str, folder: Path) -> None:
    files = [str(file) for file in visible_files(folder) if file.is_file()]
    out.data({"files": files, **tuned.to_json()})
    front = {asked.number for asked in tuned.pareto}
    best = sorted(tuned.history, key=lambda asked: asked.outcome.rank())[:_SHOWN]
    rows = [
        (
            str(asked.number + 1),
            "yes" if asked.outcome.passed else "no",
            ", ".join(f"{v:.4g}" for k, v in asked.outcome.metrics.items() if k != "n"),
            "" if asked.outcome.latency_ratio is None else f"{asked.outcome.latency_ratio:.2f}×",
            "" if asked.outcome.size is None else formatting.size(asked.outcome.size),
            "yes" if asked.number in front else "",
            str(asked.candidate),
        )
        for asked in best
    ]
    measured = ", ".join(name for name in best[0].outcome.metrics if name != "n") if best else metric
    if rows:
        out.table(["#trial", "passes", f"#{measured or metric}", "#latency", "#size", "Pareto", "candidate"], rows)
    if tuned.baseline is not None and tuned.baseline.majority is not None:
        out.say(f"always saying the most frequent class: {tuned.baseline.majority:.2f} %")
    if tuned.paired is not None:
        paired = tuned.paired
        out.say(
            f"only float is right on {paired.only_float} samples, only the quantized model on {paired.only_quantized}: "
            f"p = {paired.p_value:.2g} (McNemar)"
        )
    if tuned.quantized is None and tuned.met_goal:
        out.say("nothing is quantized in it: your float model is the answer, and no artefact was written")
    outcome = tuned.outcome
    verdict = {True: "the goal holds", False: "the goal is missed", None: "no goal was checked"}[tuned.met_goal]
    speed = "" if outcome.latency_ratio is None else f", {outcome.latency_ratio:.2f}× float's latency"
    figures = ", ".join(f"{k} {v:.4g}" for k, v in outcome.metrics.items() if k != "n")
    out.say(f"{verdict}: {figures}{speed}; {tuned.candidate}")
    out.say(f"{len(tuned.history)} trials, {tuned.full_evaluations} whole evaluations; {tuned.stopped_because}")
    for file in files:
        out.say(f"  {file}")
