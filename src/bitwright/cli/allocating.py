"""`bitwright plan --cluster`: precisions, and batches, for machines that differ."""

from __future__ import annotations

from pathlib import Path

from bitwright.cli.out import Out
from bitwright.cli.stepping import half_of, training_batch
from bitwright.errors import BitwrightError
from bitwright.planners import Allocation, uniform
from bitwright.planners.cluster import OnCluster
from bitwright.planners.machine import FLOAT
from bitwright.predict import Cluster
from bitwright.profile import record_step
from bitwright.registry import PLANNERS
from bitwright.report import words
from bitwright.sensitivity import Indications, spec_of
from bitwright.workload import Workload

_WORTH = 1.03  # another planner is named where it is faster by more than predictions are wrong
_IDLE = 32


def allocate(
    out: Out,
    workload: Workload,
    cluster: Path,
    indications: Path | None,
    planner: str,
    *,
    batch: int | None,
    channels_last: bool,
    keep_float: list[str],
    output: Path | None,
) -> None:
    """Plan, compare with what one would do without planning, and write."""
    PLANNERS.get(planner)  # a wrong name is found before anything is loaded
    if indications is None:
        raise BitwrightError(
            "nothing says how much operators suffer",
            where="--indications",
            fix="bitwright score WORKLOAD --indicator gradient-variance --formats int8 -o indications.json",
        )
    described = Cluster.load(cluster)
    suffering = Indications.load(indications)
    step = training_batch(workload, batch, channels_last=channels_last)
    formats = sorted({format for own in suffering.values.values() for format in own if format != FLOAT})
    machine = OnCluster(
        record_step(workload.model, *step, name=workload.name),
        described.profiles(cluster.parent),
        described,
        suffering.values,
        {format: spec_of(format) for format in formats},
        keep_float=keep_float,
        smaller=record_step(workload.model, *half_of(step), name=workload.name),
    )
    proportional = [kind for kind in machine.kinds if kind not in machine.predictor.smaller]
    if proportional:
        words = ", ".join(proportional)
        out.note(f"other batches are taken as proportional on {words}: bitwright profile --half-batch measures them")
    if not machine.operators:
        raise BitwrightError(
            "no profile has an operator in these formats",
            value=", ".join(formats),
            fix=f"on each device: bitwright profile WORKLOAD --kernel {formats[0] if formats else 'int8'}",
        )
    with out.phases("planning") as phase:
        rows: dict[str, Allocation] = {}
        for name in dict.fromkeys([planner, "recover", "recover+split", "batches", "float"]):
            phase(f"planning: {name}")
            rows[name] = PLANNERS.get(name)(machine)
        for format in formats:
            rows[f"all {format}"] = uniform(machine, format)
    plan = machine.to_plan(rows[planner], model=workload.name)
    if output is not None:
        plan.save(output)
    _show(out, machine, rows, planner, output)
    if output is None and not out.json:
        out.result(plan.to_yaml())


def _show(out: Out, machine: OnCluster, rows: dict[str, Allocation], planner: str, output: Path | None) -> None:
    out.data(
        {
            "output": None if output is None else str(output),
            "planner": planner,
            "allocations": {
                name: {
                    "seconds": one.seconds,
                    "penalty": one.penalty,
                    "batches": dict(one.batches),
                    "low": one.low,
                    "memory": dict(one.memory),
                    "plans": {kind: dict(plan) for kind, plan in one.plans.items()},
                }
                for name, one in rows.items()
            },
        }
    )
    out.table(
        ["planner", "#step", "#suffers", "low operators", "batches", "memory of a process"],
        [
            (
                f"{name} (chosen)" if name == planner else name,
                f"{1e3 * one.seconds:.2f} ms",
                f"{one.penalty:.3g}",
                ", ".join(f"{kind} {count} of {len(machine.operators)}" for kind, count in one.low.items()),
                ", ".join(f"{kind} {size}" for kind, size in one.batches.items()),
                ", ".join(f"{kind} {words.size(used)}" for kind, used in one.memory.items()),
            )
            for name, one in rows.items()
        ],
    )
    chosen = rows[planner]
    best = min((name for name in rows if name in PLANNERS), key=lambda name: rows[name].seconds)
    faster = chosen.seconds / rows[best].seconds
    if not any(chosen.low.values()) and len(set(chosen.batches.values())) == 1:
        file = "" if output is None else f" ({output} says float everywhere)"
        out.say(f"nothing is won here by low precision{'' if faster > _WORTH else ': train without a plan'}{file}")
    elif output is not None:
        processes = [kind for kind, count in machine.kinds.items() for _ in range(count)]
        out.say(f"{output}: train with")
        out.say(
            f"  torchrun --nproc-per-node {len(processes)} -m bitwright train WORKLOAD --plan {output} "
            f"--kind {','.join(processes)} --batch {machine.batch}"
        )
    if faster > _WORTH:
        out.say(f"{best} is {faster:.2g} times as fast: --planner {best}")
    for kind, size in chosen.batches.items():
        if size * _IDLE < max(chosen.batches.values()):
            out.note(f"{kind} is left with {size} of {sum(chosen.batches.values())} samples: hardly worth its place")
