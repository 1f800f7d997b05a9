"""`bitwright plan-cluster`: plan low-precision training on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bitwright.cli.data import open_workload
from bitwright.cli.options import KeepFloatOption, WorkloadArg
from bitwright.cli.out import Out
from bitwright.cli.step_options import BatchOption, LayoutOption
from bitwright.cli.verb import verb
from bitwright.core import formatting
from bitwright.core.errors import BitwrightError
from bitwright.core.registry import PLANNERS

if TYPE_CHECKING:
    from bitwright.cluster import MemoryLimit
    from bitwright.cluster.plan_cluster import PlannerComparison

_SMALL_SHARE = 32


@verb(
    "plan-cluster",
    examples="""
    bitwright plan-cluster digits-untrained --cluster cluster.yaml --scores scores.json -o plan.yaml
    bitwright plan-cluster digits-untrained --cluster cluster.yaml --scores scores.json --planner recover+split
    """,
)
def plan_cluster(
    out: Out,
    workload: WorkloadArg,
    cluster: Annotated[Path, typer.Option(help="The cluster.yaml.", show_default=False)],
    scores: Annotated[
        Path | None,
        typer.Option(help="The sensitivity scores: a file of `bitwright score --indicator`.", show_default=False),
    ] = None,
    planner: Annotated[str, typer.Option(help="A name of `bitwright list planners`.")] = "recover",
    profiles: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND=FILE",
            help="Profiles of device kinds, instead of those in cluster.yaml; repeatable, or with commas.",
            show_default=False,
        ),
    ] = None,
    batch: BatchOption = None,
    channels_last: LayoutOption = False,
    keep_float: KeepFloatOption = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan here, not to stdout.", show_default=False)
    ] = None,
) -> None:
    """Choose a precision for every operator on each kind of device of a cluster, and compare planners."""
    from bitwright.cluster import Cluster
    from bitwright.cluster.plan_cluster import compare_planners
    from bitwright.sensitivity import OperatorScores

    PLANNERS.get(planner)
    if scores is None:
        raise BitwrightError(
            "--scores is required",
            where="--scores",
            fix=f"bitwright score {workload} --indicator gradient-variance --formats int8 -o scores.json",
            code="scores-missing",
        )
    described = Cluster.load(cluster)
    known = OperatorScores.load(scores)
    measured = described.profiles(given=_by_kind(profiles or []))
    found = open_workload(out, workload)
    with out.phases("planning") as phase:
        comparison = compare_planners(
            found,
            described,
            known,
            planner=planner,
            profiles=measured,
            batch=batch,
            channels_last=channels_last,
            keep_float=keep_float or [],
            progress=lambda done, total, words: phase(words),
        )
    if output is not None:
        comparison.plan.save(output)
    _show(out, comparison, output, f"{workload}{' --channels-last' if channels_last else ''}")
    if output is None and not out.json:
        out.result(comparison.plan.to_yaml())


def _by_kind(profiles: list[str]) -> dict[str, Path]:
    """Parse `big=a.json`, or `big.json` for the kind of that name; commas separate several."""
    found = {}
    for text in (part for given in profiles for part in given.split(",")):
        kind, equals, path = text.partition("=")
        found[kind if equals else Path(text).stem] = Path(path if equals else text)
    return found


def _show(out: Out, comparison: PlannerComparison, output: Path | None, trained: str) -> None:
    from bitwright.cluster.memory import describe_limits

    limits, chosen = comparison.limits, comparison.chosen
    out.data({"output": None if output is None else str(output), **comparison.to_dict()})
    out.table(
        ["planner", "#step", "#penalty", "low-precision operators", "batches", "memory of a process"],
        [
            (
                f"{name} (chosen)" if name == comparison.planner else name,
                f"{1e3 * one.seconds:.2f} ms",
                f"{one.penalty:.3g}",
                ", ".join(f"{kind} {count} of {comparison.operators}" for kind, count in one.low.items()),
                ", ".join(f"{kind} {size}" for kind, size in one.batches.items()),
                ", ".join(_memory(kind, used, limits[kind]) for kind, used in one.memory.items()),
            )
            for name, one in comparison.allocations.items()
        ]
        + [(name, "–", "–", "no plan fits", "–", error.problems[0].what) for name, error in comparison.failed.items()],
    )
    if any(limits.values()):
        out.say(f"memory limit of a process: {describe_limits(limits)}")
    if comparison.gains_nothing:
        advice = "" if comparison.faster else ": train without a plan"
        file = "" if output is None else f" ({output} is float everywhere)"
        out.say(f"low precision gives no speedup on this cluster{advice}{file}")
    elif output is not None:
        processes = [kind for kind, count in comparison.kinds.items() for _ in range(count)]
        out.say(f"{output}: train with")
        out.say(
            f"  torchrun --nproc-per-node {len(processes)} -m bitwright train {trained} --plan {output} "
            f"--device-kind {','.join(processes)} -o run"
        )
    if comparison.faster is not None:
        best, ratio = comparison.faster
        out.say(f"{best} is {ratio:.2g} times as fast: --planner {best}")
    for kind, size in chosen.batches.items():
        if size * _SMALL_SHARE < max(chosen.batches.values()):
            total = sum(chosen.batches.values())
            out.note(f"{kind} gets only {size} of {total} samples: consider training without it")


def _memory(kind: str, used: int, limit: MemoryLimit | None) -> str:
    over = f" (of {formatting.size(limit.usable)}: too much)" if limit is not None and not limit.holds(used) else ""
    return f"{kind} {formatting.size(used)}{over}"
