"""`bitwright tune`: search until the accuracy goal is met."""

from __future__ import annotations

from typing import Annotated

import typer

from bitwright.cli.options import BackendOption, FolderOption, GridWorkloadOption, SamplesOption, open_workload, option
from bitwright.cli.out import Out
from bitwright.cli.verb import verb


@verb(
    "tune",
    examples="""
    bitwright tune digits --drop 1% --minutes 10 -o digits-tuned
    bitwright tune config.yaml -o tuned
    bitwright tune config.yaml --workload my_workload.py:small --strategy tpe --trials 200 -o tuned
    bitwright tune digits -o tuned --store postgresql://user@host/bitwright --resume
    """,
)
def tune(
    out: Out,
    what: Annotated[str, typer.Argument(metavar="CONFIG|WORKLOAD", help="A YAML file, or a workload.")],
    output: FolderOption,
    workload: GridWorkloadOption = None,
    drop: Annotated[str | None, option("Allowed loss: 1% of the float metric, or 0.5 in its units.")] = None,
    lower_is_better: Annotated[bool, option("Smaller values of the metric are better.", "--lower-is-better")] = False,
    minutes: Annotated[float | None, option("Time to spend.", min=0)] = None,
    trials: Annotated[int | None, option("Maximum number of candidates.", min=1)] = None,
    first: Annotated[bool, option("Stop at the first model that passes.", "--first")] = False,
    strategy: Annotated[str | None, option("A name of `bitwright list strategies`.")] = None,
    backend: BackendOption = None,
    store: Annotated[str | None, option("Where trials are stored: a file, or postgresql://… (default: in -o).")] = None,
    name: Annotated[str | None, option("Name of the study in the store.")] = None,
    resume: Annotated[
        bool, option("Continue or join a study in --store; a study in -o is always continued.", "--resume")
    ] = False,
    seed: Annotated[int | None, option("Random seed.", min=0)] = None,
    samples: SamplesOption = None,
) -> None:
    """Find the fastest quantized model that loses no more than the goal allows; write it with a report.

    The whole budget is spent to find a faster one, unless --first is given. If no candidate meets the goal, the best
    one is written and the exit code is 1. After an interruption, rerun the command to resume. Several
    processes, on several machines, can work on one study in PostgreSQL (--store, --resume), each with its own -o.
    """
    from bitwright.core.errors import WorkloadError
    from bitwright.tuning import TuneConfig
    from bitwright.workflows import tune_workload
    from bitwright.workload import can_measure

    config = TuneConfig.load(what) if what.endswith((".yaml", ".yml")) else TuneConfig(workload=what)
    config = config.updated(
        {
            "workload": workload,
            "strategy": strategy,
            "backend": backend,
            "store": store,
            "name": name,
            "seed": seed,
            "samples": samples,
        },
        goal={"drop": drop, "lower_is_better": lower_is_better or None},
        budget={"minutes": minutes, "trials": trials, "stop": "first" if first else None},
    )
    given = None if config.workload is None else open_workload(out, config.workload)
    found = config.make_workload(given)
    if drop is not None and not can_measure(found):
        raise WorkloadError(
            "--drop needs a metric, but the workload has none",
            where=f"workload {found.name!r}",
            fix="give the Workload evaluation= or evaluate=, or omit --drop to quantize the model once",
            code="no-evaluation-data",
        )
    with out.progress() as progress:
        tuned = tune_workload(config, output, workload=found, resume=resume, progress=progress)
    out.show(tuned, output=output)
