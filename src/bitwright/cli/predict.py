"""`bitwright predict`: predict the step time and the memory of a plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from bitwright.cli.data import open_workload
from bitwright.cli.options import ReportOption, WorkloadArg
from bitwright.cli.out import Out
from bitwright.cli.settings import with_settings
from bitwright.cli.step_options import BatchOption, LayoutOption, PlanOption, PrecisionOption
from bitwright.cli.verb import verb
from bitwright.cluster import Cluster, Prediction, write_trace
from bitwright.cluster.measurement import StepComparison, check_is_here, compare_with_steps
from bitwright.cluster.memory import describe_limits
from bitwright.cluster.predictor import predict
from bitwright.core import formatting
from bitwright.core.errors import BitwrightError, PlanError, Problem
from bitwright.profiling import DeviceProfile, StepGraph, StepSettings
from bitwright.reports import add_to_report, forecast, report_of


@verb(
    "predict",
    examples="""
    bitwright predict digits-untrained --profile device.json --precision int8
    bitwright predict digits-untrained --profile device.json --plan plan.yaml --compare 30
    bitwright predict digits-untrained --profile device.json --precision int8 --compare 30 --report out
    bitwright predict digits-untrained --cluster cluster.yaml --trace step.trace.json
    """,
)
@with_settings(StepSettings)
def predict_(
    out: Out,
    workload: WorkloadArg,
    settings: StepSettings,
    profile: Annotated[
        Path | None, typer.Option(help="Predict for one device: its profile.", show_default=False)
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option(help="Predict for a cluster: its cluster.yaml.", show_default=False)
    ] = None,
    precision: PrecisionOption = None,
    plan: PlanOption = None,
    batch: BatchOption = None,
    channels_last: LayoutOption = False,
    graph: Annotated[
        Path | None, typer.Option(help="Use this recorded step (`profile --graph`).", show_default=False)
    ] = None,
    exact: Annotated[bool, typer.Option("--exact", help="Simulate each device by itself.")] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Write a Chrome trace of the step to this file.", show_default=False)
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option("--compare", min=3, help="Also run this many real steps and compare.", show_default=False),
    ] = None,
    report: ReportOption = None,
) -> None:
    """Predict a training step from device profiles: its time, its memory, and which devices wait for others."""
    if (profile is None) == (cluster is None):
        raise BitwrightError("give either --profile or --cluster", fix="--profile device.json for one device")
    if steps is not None and profile is None:
        raise BitwrightError("--compare runs on this device only", where="--compare", fix="use --profile")
    if plan is not None and precision is not None:
        raise BitwrightError("give either --plan or --precision", where="--plan", value=plan, fix="remove one of them")
    target, profiles, recorded = _read(profile, cluster, graph)
    if steps is not None:
        check_is_here(profiles["device"])
    found = open_workload(out, workload)
    if report is not None:
        report_of(report, found.name)  # reject the report of another workload before any work
    prediction = predict(
        found,
        target,
        plan or precision,
        profiles=profiles if isinstance(target, Cluster) else None,
        batch=batch,
        channels_last=channels_last,
        settings=settings,
        graph=recorded,
        exact=exact,
    )
    if trace is not None:
        write_trace(prediction, trace)
    comparison = None
    if steps is not None:
        with out.steps("running", steps) as step:
            comparison = compare_with_steps(
                found,
                prediction,
                plan or precision,
                steps=steps,
                batch=batch,
                channels_last=channels_last,
                settings=settings,
                progress=lambda done, total, words: step(done),
            )
    if report is not None:
        name = f"{plan or precision or 'float'} on {', '.join(device.name for device in prediction.devices[:4])}"
        add_to_report(report, found.name, forecasts=(forecast(prediction, name, comparison),))
        out.note(f"the timeline is in {report / 'report.html'}")
    _show(out, prediction, comparison, trace)


def _read(
    profile: Path | None, cluster: Path | None, graph: Path | None
) -> tuple[DeviceProfile | Cluster, dict[str, DeviceProfile], StepGraph | None]:
    """Read all files; report the problems of all of them together."""
    problems: list[Problem] = []
    profiles: dict[str, DeviceProfile] = {}
    target: DeviceProfile | Cluster | None = None
    recorded = None
    if profile is not None:
        with _collecting(problems, profile):
            target = DeviceProfile.load(profile)
            profiles = {"device": target}
    if cluster is not None:
        with _collecting(problems, cluster):
            target = Cluster.load(cluster)
            problems += target.missing_plans()
            profiles = target.profiles()
    if graph is not None:
        with _collecting(problems, graph):
            recorded = StepGraph.load(graph)
    if problems or target is None:
        raise PlanError(problems, title="can't use the given files")
    return target, profiles, recorded


@contextmanager
def _collecting(problems: list[Problem], file: Path) -> Iterator[None]:
    try:
        yield
    except BitwrightError as error:
        for problem in error.problems:
            where = problem.where or ""
            problems.append(problem if file.name in where else replace(problem, where=f"{file}: {where}"))


def _show(out: Out, prediction: Prediction, comparison: StepComparison | None, trace: Path | None) -> None:
    out.data({**prediction.to_dict(), "compared": None if comparison is None else asdict(comparison)})
    out.say(f"a step takes {1e3 * prediction.seconds:.2f} ms, {prediction.samples_per_second:.0f} samples per second")
    heads = "device #count #compute #busy #collectives #waits #tensors peak #process #limit fits"
    out.table(
        heads.split(),
        [
            (
                device.name,
                str(device.count),
                f"{1e3 * device.computing:.2f} ms",
                f"{100 * device.busy:.0f} %",
                f"{100 * device.communicating:.0f} %",
                f"{100 * device.waiting:.0f} %",
                "" if device.memory is None else formatting.size(device.memory.peak),
                "" if device.memory is None else device.memory.cause,
                "" if device.memory is None else formatting.size(device.memory.process),
                "" if device.limit is None else formatting.size(device.limit.usable),
                {True: "yes", False: "no", None: ""}[device.fits],
            )
            for device in prediction.devices[:20]
        ],
    )
    if any(device.limit is not None for device in prediction.devices):
        out.say(f"memory limit of a process: {describe_limits(prediction.limits)}")
    if len(prediction.devices) > 1:
        out.say("a device waits for others and for collectives; collectives also overlap with its own work")
    for device in prediction.devices:
        if device.stood_in:
            out.note(f"{device.name}: {device.stood_in} operators have no time in their format; float times are used")
    if prediction.without_scaling:
        kinds = ", ".join(prediction.without_scaling)
        out.note(f"the step excludes fp16 loss scaling: the profile of {kinds} doesn't have it")
    out.say("critical path: " + " → ".join(prediction.critical))
    if comparison is not None:
        _show_comparison(out, comparison)
    if trace is not None:
        out.say(f"{trace}: open it at ui.perfetto.dev")


def _show_comparison(out: Out, comparison: StepComparison) -> None:
    if comparison.drift is not None and comparison.error_without_drift is not None:
        out.say(
            f"this machine now takes {comparison.drift:.2f} times as long as when it was profiled; "
            f"error without that: {100 * comparison.error_without_drift:+.1f} %"
        )
    out.table(
        [f"median of {comparison.steps} steps", "#predicted", "#measured", "#error"],
        [
            (
                pair.name,
                f"{1e3 * pair.predicted:.3f} ms",
                f"{1e3 * pair.measured:.3f} ms",
                "" if pair.error is None else f"{100 * pair.error:+.1f} %",
            )
            for pair in [comparison.step, *comparison.phases, *comparison.groups]
            if max(pair.predicted, pair.measured) > 0
        ],
    )
