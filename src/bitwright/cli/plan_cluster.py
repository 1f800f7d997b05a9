"""`bitwright plan-cluster`: plan low-precision training on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from bitwright.cli.options import (
    BatchOption,
    ChannelsLastOption,
    KeepFloatOption,
    WorkloadArg,
    open_workload,
    option,
    require,
)
from bitwright.cli.out import Out
from bitwright.cli.verb import verb


@verb(
    "plan-cluster",
    writes=("output",),
    examples="""
    bitwright plan-cluster digits-untrained --cluster cluster.yaml --scores scores.json -o plan.yaml
    bitwright plan-cluster digits-untrained --cluster cluster.yaml --scores scores.json --planner recover+split
    """,
)
def plan_cluster(
    out: Out,
    workload: WorkloadArg,
    cluster: Annotated[Path, option("The cluster.yaml.")],
    scores: Annotated[Path | None, option("The sensitivity scores: a file of `bitwright score --indicator`.")] = None,
    planner: Annotated[str, option("A name of `bitwright list planners`.", show_default=True)] = "recover",
    profiles: Annotated[
        list[str] | None,
        option(
            "Profiles of device kinds, instead of those in cluster.yaml; repeatable, or with commas.",
            metavar="KIND=FILE",
        ),
    ] = None,
    batch: BatchOption = None,
    channels_last: ChannelsLastOption = False,
    keep_float: KeepFloatOption = None,
    output: Annotated[Path | None, option("Write the plan here, not to stdout.", "--output", "-o")] = None,
) -> None:
    """Choose a precision for every operator on each kind of device of a cluster, and compare planners."""
    from bitwright.cluster import Cluster
    from bitwright.cluster.cluster_plan import compare_planners
    from bitwright.core.registry import PLANNERS
    from bitwright.sensitivity import OperatorScores

    PLANNERS.get(planner)
    fix = f"bitwright score {workload} --indicator gradient-variance --formats int8 -o scores.json"
    require("--scores", scores, fix)
    described = Cluster.load(cluster)
    known = OperatorScores.load(Path(scores or ""))
    measured = described.profiles(given=_by_kind(profiles or []))
    found = open_workload(out, workload)
    with out.progress("planning") as progress:
        result = compare_planners(
            found,
            described,
            known,
            planner=planner,
            profiles=measured,
            batch=batch,
            channels_last=channels_last,
            keep_float=keep_float or [],
            progress=progress,
        )
    if output is not None:
        result.plan.save(output)
    out.show(result, output=output)
    if output is None and not out.json:
        out.result(result.plan.to_yaml())
    elif output is not None and not result.gains_nothing:
        kinds = ",".join(kind for kind, count in result.kinds.items() for _ in range(count))
        start = f"torchrun --nproc-per-node {sum(result.kinds.values())} -m bitwright train {workload}"
        layout = " --channels-last" if channels_last else ""
        out.say(f"train with: {start}{layout} --plan {output} --device-kind {kinds} -o run")


def _by_kind(profiles: list[str]) -> dict[str, Path]:
    """Parse `big=a.json`, or `big.json` for the kind of that name; commas separate several."""
    found = {}
    for text in (part for given in profiles for part in given.split(",")):
        kind, equals, path = text.partition("=")
        found[kind if equals else Path(text).stem] = Path(path if equals else text)
    return found
