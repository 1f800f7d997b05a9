"""`bitwright predict`: the step time and memory of a plan, before it runs."""

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
from bitwright.cli.stepping import (
    BatchOption,
    LayoutOption,
    PrecisionOption,
    half_of,
    limits_in_words,
    plan_of,
    same_batch,
    tell_layout,
    training_batch,
    variant_of,
)
from bitwright.cli.verb import verb
from bitwright.cluster import Cluster, Prediction, Predictor, write_trace
from bitwright.cluster.compare import Comparison, check_is_here, compare
from bitwright.core import formatting
from bitwright.core.errors import BitwrightError, PlanError, Problem
from bitwright.plan import Plan
from bitwright.profiling import DeviceProfile, StepGraph, StepSettings, record_step
from bitwright.report import add_to_report, forecast, report_of
from bitwright.workload import Workload


@verb(
    "predict",
    examples="""
    bitwright predict digits-untrained --profile device.json --quantize int8
    bitwright predict digits-untrained --profile device.json --quantize plan.yaml --compare 30
    bitwright predict digits-untrained --profile device.json --quantize int8 --compare 30 --report out
    bitwright predict digits-untrained --cluster cluster.yaml --trace step.trace.json
    """,
)
@with_settings(StepSettings)
def predict_(
    out: Out,
    workload: WorkloadArg,
    settings: StepSettings,
    profile: Annotated[
        Path | None, typer.Option("--profile", help="The device's profile, for one device.", show_default=False)
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option("--cluster", help="A cluster.yaml, for several.", show_default=False)
    ] = None,
    quantize: PrecisionOption = None,
    batch: BatchOption = None,
    channels_last: LayoutOption = False,
    graph: Annotated[
        Path | None, typer.Option("--graph", help="A step that was recorded before.", show_default=False)
    ] = None,
    exact: Annotated[bool, typer.Option("--exact", help="Replay each device by itself.")] = False,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write a Chrome trace of the step here.", show_default=False)
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option("--compare", min=3, help="Run so many real steps here, and show both.", show_default=False),
    ] = None,
    report: ReportOption = None,
) -> None:
    """Replay a training step from what was measured: its length, who waits for whom, memory and its peak."""
    if (profile is None) == (cluster is None):
        raise BitwrightError("give either --profile or --cluster", fix="--profile device.json for one device")
    if steps is not None and profile is None:
        raise BitwrightError("only this device can be compared", where="--compare", fix="use --profile")
    profiles, described, recorded = _read(profile, cluster, graph)
    if steps is not None:
        (here,) = profiles.values()
        check_is_here(here)
        if here.source == "imported":
            out.note("the profile was imported: nobody says if its trace is of this device, with as many threads")
    found = open_workload(out, workload)
    if report is not None:
        report_of(report, found.name)  # one of another workload is an error now, not after the work
    plan = Plan() if quantize is None else plan_of(found, quantize)
    channels_last = channels_last or any(device.channels_last for device in plan.devices.values())
    if recorded is None:
        tell_layout(out, profiles, channels_last=channels_last)
    pair, loss = training_batch(found, batch, channels_last=channels_last)
    if recorded is None:
        recorded = record_step(found.model, pair, loss, name=found.name)
    # other batches lie on a line through this one and half of it, as for planners
    unequal = graph is None and any(device.batch is not None for device in plan.devices.values())
    half = record_step(found.model, *half_of((pair, loss)), name=found.name) if unequal else None
    with same_batch(profiles, recorded.samples):
        if described is None or cluster is None:
            predictor = Predictor.make(recorded, plan, profiles, None, settings)
        else:
            predictor = _on_cluster(found, recorded, half, plan, profiles, described, cluster.parent, settings)
        prediction = predictor.predict(exact=exact)
    if trace is not None:
        write_trace(prediction, trace)
    comparison = None
    if steps is not None:
        local = next(iter(predictor.locals.values()))
        variant = variant_of(found, plan, pair, settings)
        with out.steps("running", steps) as step:
            comparison = compare(local, variant, pair, loss, steps=steps, clock=local.profile.clock, progress=step)
    if report is not None:
        name = f"{quantize or 'float'} on {', '.join(device.name for device in prediction.devices[:4])}"
        add_to_report(report, found.name, forecasts=(forecast(prediction, name, comparison),))
        out.note(f"{report / 'report.html'} has the timeline")
    _show(out, prediction, comparison, trace)


def _read(
    profile: Path | None, cluster: Path | None, graph: Path | None
) -> tuple[dict[str, DeviceProfile], Cluster | None, StepGraph | None]:
    """The files that were named; what is wrong with any of them is said together, before any work."""
    problems: list[Problem] = []
    profiles: dict[str, DeviceProfile] = {}
    described = recorded = None
    if profile is not None:
        with _collecting(problems, profile):
            profiles = {"device": DeviceProfile.load(profile)}
    if cluster is not None:
        with _collecting(problems, cluster):
            described = Cluster.load(cluster)
            problems += _missing_plans(described, cluster.parent)
            profiles = described.profiles(cluster.parent)
    if graph is not None:
        with _collecting(problems, graph):
            recorded = StepGraph.load(graph)
    if problems:
        raise PlanError(problems, title="what was given can't be used")
    return profiles, described, recorded


@contextmanager
def _collecting(problems: list[Problem], file: Path) -> Iterator[None]:
    try:
        yield
    except BitwrightError as error:
        for problem in error.problems:
            where = problem.where or ""
            problems.append(problem if file.name in where else replace(problem, where=f"{file}: {where}"))


def _missing_plans(cluster: Cluster, folder: Path) -> list[Problem]:
    fix = "write it, or leave `plan` out: the common plan counts then"
    return [
        Problem(what="there is no such plan", where=f"{name}: {folder / kind.plan}", fix=fix)
        for name, kind in cluster.devices.items()
        if kind.plan is not None and not (folder / kind.plan).is_file()
    ]


def _on_cluster(
    workload: Workload,
    graph: StepGraph,
    half: StepGraph | None,
    plan: Plan,
    profiles: dict[str, DeviceProfile],
    cluster: Cluster,
    folder: Path,
    settings: StepSettings,
) -> Predictor:
    plans = {
        name: plan_of(workload, folder / kind.plan)
        if kind.plan is not None
        else (plan.for_device(name) if name in plan.devices else plan)
        for name, kind in cluster.devices.items()
    }
    batches = {name: device.batch for name, device in plan.devices.items() if device.batch is not None}
    return Predictor.make(graph, plans, profiles, cluster, settings, batches=batches, smaller=half)


def _show(out: Out, prediction: Prediction, comparison: Comparison | None, trace: Path | None) -> None:
    out.data({**prediction.to_dict(), "compared": None if comparison is None else asdict(comparison)})
    out.say(f"a step takes {1e3 * prediction.seconds:.2f} ms, {prediction.samples_per_second:.0f} samples per second")
    out.table(
        [
            "device",
            "#count",
            "#own work",
            "#busy",
            "#collectives",
            "#waits",
            "#tensors",
            "at",
            "#process",
            "#limit",
            "fits",
        ],
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
        kinds = (run.lane.kind for run in prediction.replay.lanes)  # of each device, in their order
        limits = {kind: device.limit for kind, device in zip(kinds, prediction.devices, strict=True)}
        out.say(f"limit, of a process: {limits_in_words(limits)}")
    if len(prediction.devices) > 1:
        out.say("waits: for others and for collectives, which also run beside own work: shares don't add up to 100 %")
    for device in prediction.devices:
        if device.stood_in:
            out.note(f"{device.name}: {device.stood_in} operators weren't measured in their format; float stands in")
    lacking = [name for name, local in prediction.locals.items() if local.lacks_scaling]
    if lacking:
        out.note(f"fp16's loss scaling isn't in the step: the profile of {', '.join(lacking)} doesn't have it")
    out.say("critical path: " + " → ".join(prediction.critical))
    if comparison is not None:
        if comparison.drift is not None and comparison.error_without_drift is not None:
            out.say(
                f"this machine takes {comparison.drift:.2f} times as long as when it was profiled; "
                f"error without that: {100 * comparison.error_without_drift:+.1f} %"
            )
        rows = [comparison.step, *comparison.phases, *comparison.groups]
        out.table(
            [f"median of {comparison.steps} steps", "#predicted", "#measured", "#error"],
            [
                (
                    pair.name,
                    f"{1e3 * pair.predicted:.3f} ms",
                    f"{1e3 * pair.measured:.3f} ms",
                    "" if pair.error is None else f"{100 * pair.error:+.1f} %",
                )
                for pair in rows
                if max(pair.predicted, pair.measured) > 0
            ],
        )
    if trace is not None:
        out.say(f"{trace}: open it at ui.perfetto.dev")
