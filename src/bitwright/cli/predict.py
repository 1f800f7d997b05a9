"""`bitwright predict`: predict the step time and the memory of a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from bitwright.cli.options import (
    BatchOption,
    ChannelsLastOption,
    PlanOption,
    PrecisionOption,
    ReportOption,
    WorkloadArg,
    exclude,
    open_workload,
    option,
    require,
)
from bitwright.cli.out import Out
from bitwright.cli.settings import with_settings
from bitwright.cli.verb import verb
from bitwright.training.config import StepSettings


@verb(
    "predict",
    writes=("trace",),
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
    profile: Annotated[Path | None, option("Predict for one device: its profile.")] = None,
    cluster: Annotated[Path | None, option("Predict for a cluster: its cluster.yaml.")] = None,
    precision: PrecisionOption = None,
    plan: PlanOption = None,
    batch: BatchOption = None,
    channels_last: ChannelsLastOption = False,
    graph: Annotated[Path | None, option("Use this recorded step (`profile --graph`).")] = None,
    exact: Annotated[bool, option("Simulate each device separately.", "--exact")] = False,
    trace: Annotated[Path | None, option("Write a Chrome trace of the step to this file.")] = None,
    steps: Annotated[int | None, option("Also run this many real steps and compare.", "--compare", min=3)] = None,
    report: ReportOption = None,
) -> None:
    """Predict a training step from device profiles: its time, its memory, and which devices wait for others."""
    from bitwright.cluster import Cluster, write_trace
    from bitwright.cluster.measurement import check_is_here, compare_with_steps
    from bitwright.cluster.predictor import predict, read_target
    from bitwright.reports import add_to_report, forecast, report_of

    require("--profile", profile or cluster, "--profile device.json for one device, or --cluster cluster.yaml")
    if profile is not None:
        exclude("--profile", {"--cluster": cluster})
    if steps is not None:
        exclude("--compare", {"--cluster": cluster})
    if plan is not None:
        exclude("--plan", {"--precision": precision})
    target, profiles, recorded = read_target(profile=profile, cluster=cluster, graph=graph)
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
        with out.progress("running") as progress:
            comparison = compare_with_steps(
                found,
                prediction,
                plan or precision,
                steps=steps,
                batch=batch,
                channels_last=channels_last,
                settings=settings,
                progress=progress,
            )
    if report is not None:
        name = f"{plan or precision or 'float'} on {', '.join(device.name for device in prediction.devices[:4])}"
        add_to_report(report, found.name, forecasts=(forecast(prediction, name, comparison),))
        out.note(f"the timeline is in {report / 'report.html'}")
    out.show(prediction, compared=None if comparison is None else comparison.to_dict())
    if comparison is not None:
        out.summary(comparison)
    if trace is not None:
        out.say(f"{trace}: open it at ui.perfetto.dev")
