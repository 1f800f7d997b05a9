"""`bitwright plan --cluster`: precisions, and batches, for machines that differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bitwright.cli.out import Out
from bitwright.cli.stepping import half_of, limits_in_words, same_batch, tell_layout, training_batch
from bitwright.cluster import Cluster, MemoryLimit
from bitwright.cluster.cluster_cost_model import OnCluster
from bitwright.cluster.cost_model import FLOAT
from bitwright.cluster.planners import Allocation, uniform
from bitwright.cluster.planners.precision import over_limits
from bitwright.core import formatting
from bitwright.core.errors import BitwrightError, PlanError
from bitwright.core.registry import PLANNERS
from bitwright.core.tensor_tree import batch_size
from bitwright.profiling import record_step
from bitwright.sensitivity import Indications, spec_of
from bitwright.workload import Workload

_WORTH = 1.03  # another planner is named where it is faster by more than predictions are wrong
_IDLE = 32
_BESIDE = ("recover", "recover+split", "batches", "float")  # what one would do else


def allocate(
    out: Out,
    workload: Workload,
    ref: str,
    cluster: Path,
    indications: Path | None,
    planner: str,
    *,
    profiles: list[str],
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
            fix=f"bitwright score {ref} --indicator gradient-variance --formats int8 -o indications.json",
        )
    described = Cluster.load(cluster)
    suffering = Indications.load(indications)
    measured = described.profiles(cluster.parent, _by_kind(profiles))
    tell_layout(out, measured, channels_last=channels_last)
    step = training_batch(workload, batch, channels_last=channels_last)
    formats = sorted({format for own in suffering.values.values() for format in own if format != FLOAT})
    with same_batch(measured, batch_size(step[0])):
        machine = OnCluster(
            record_step(workload.model, *step, name=workload.name),
            measured,
            described,
            suffering.values,
            {format: spec_of(format) for format in formats},
            keep_float=keep_float,
            smaller=record_step(workload.model, *half_of(step), name=workload.name),
        )
    _check(out, machine, suffering, formats, indications, keep_float)
    rows, failed = _rows(out, machine, planner, formats)
    plan = machine.to_plan(rows[planner], model=workload.name)
    laid_out = {kind: replace(device, channels_last=channels_last) for kind, device in plan.devices.items()}
    plan = replace(plan, devices=laid_out)
    if output is not None:
        plan.save(output)
    _show(out, machine, rows, failed, planner, output, f"{ref}{' --channels-last' if channels_last else ''}")
    if output is None and not out.json:
        out.result(plan.to_yaml())


def _by_kind(profiles: list[str]) -> dict[str, Path]:
    """`big=a.json`, or `big.json` for the kind of that name; several with commas between."""
    found = {}
    for text in (part for given in profiles for part in given.split(",")):
        kind, equals, path = text.partition("=")
        found[kind if equals else Path(text).stem] = Path(path if equals else text)
    return found


def _check(
    out: Out, machine: OnCluster, suffering: Indications, formats: list[str], file: Path, keep_float: list[str]
) -> None:
    """Say what can't be planned, and why."""
    names = set(machine.graph.position)
    strange = [name for name in suffering.values if name not in names]
    if machine.operators:
        if strange:
            out.note(
                f"{file} scores {_some(strange)}, which the model doesn't have: another model's, or an older one's?"
            )
        if machine.unscored:
            out.note(f"{_some(machine.unscored)} stay in float: {file} doesn't say what they suffer")
        proportional = ", ".join(kind for kind in machine.kinds if kind not in machine.predictor.smaller)
        if proportional:
            fix = "bitwright profile --half-batch measures them"
            out.note(f"other batches are taken as proportional on {proportional}: {fix}")
        return
    scored = [name for name in suffering.values if name in names]
    if not scored:
        raise BitwrightError(
            f"the indications are of another model: they score {_some(strange)}, the model has {_some(sorted(names))}",
            where=str(file),
            fix="bitwright score WORKLOAD --indicator gradient-variance --formats int8 -o indications.json",
        )
    if all(name in machine.kept for name in scored):
        raise BitwrightError(
            "all operators that could be lower are kept in float",
            where="--keep-float",
            value=", ".join(keep_float),
            fix=f"leave some of {_some(scored)} to the planner, or train without a plan",
        )
    raise BitwrightError(
        "no profile has an operator in these formats",
        value=f"{', '.join(formats)}; scored: {_some(scored)}",
        fix=f"on each device: bitwright profile WORKLOAD --kernel {formats[0] if formats else 'int8'}",
    )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _rows(
    out: Out, machine: OnCluster, planner: str, formats: list[str]
) -> tuple[dict[str, Allocation], dict[str, PlanError]]:
    """What was asked for, and beside it what others would do: one that can't doesn't matter to the one that can."""
    rows: dict[str, Allocation] = {}
    failed: dict[str, PlanError] = {}
    with out.phases("planning") as phase:
        for name in dict.fromkeys([planner, *_BESIDE]):
            phase(f"planning: {name}")
            try:
                rows[name] = PLANNERS.get(name)(machine)
            except PlanError as error:
                if name == planner:
                    raise
                failed[name] = error
        for format in formats:
            rows[f"all {format}"] = uniform(machine, format)
    for problem in over_limits(machine, rows[planner]):
        out.note(f"{planner} doesn't fit: {problem}")
    return rows, failed


def _show(
    out: Out,
    machine: OnCluster,
    rows: dict[str, Allocation],
    failed: dict[str, PlanError],
    planner: str,
    output: Path | None,
    trained: str,
) -> None:
    limits = {kind: machine.room(kind) for kind in machine.kinds}
    out.data(
        {
            "output": None if output is None else str(output),
            "planner": planner,
            "limits": {
                kind: None if one is None else {"total": one.total, "reserve": one.reserve, "usable": one.usable}
                for kind, one in limits.items()
            },
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
            "failed": {name: [str(problem) for problem in error.problems] for name, error in failed.items()},
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
                ", ".join(_memory(kind, used, limits[kind]) for kind, used in one.memory.items()),
            )
            for name, one in rows.items()
        ]
        + [(name, "–", "–", "no plan fits", "–", error.problems[0].what) for name, error in failed.items()],
    )
    if any(limits.values()):
        out.say(f"limit, of a process: {limits_in_words(limits)}")
    chosen = rows[planner]
    sound = [name for name in rows if name in PLANNERS and (name == planner or not over_limits(machine, rows[name]))]
    best = min(sound, key=lambda name: rows[name].seconds)
    faster = chosen.seconds / rows[best].seconds
    if not any(chosen.low.values()) and len(set(chosen.batches.values())) == 1:
        file = "" if output is None else f" ({output} says float everywhere)"
        out.say(f"nothing is won here by low precision{'' if faster > _WORTH else ': train without a plan'}{file}")
    elif output is not None:
        processes = [kind for kind, count in machine.kinds.items() for _ in range(count)]
        out.say(f"{output}: train with")
        out.say(
            f"  torchrun --nproc-per-node {len(processes)} -m bitwright train {trained} --plan {output} "
            f"--kind {','.join(processes)} -o run"
        )
    if faster > _WORTH:
        out.say(f"{best} is {faster:.2g} times as fast: --planner {best}")
    for kind, size in chosen.batches.items():
        if size * _IDLE < max(chosen.batches.values()):
            out.note(f"{kind} is left with {size} of {sum(chosen.batches.values())} samples: hardly worth its place")


def _memory(kind: str, used: int, limit: MemoryLimit | None) -> str:
    over = f" (of {formatting.size(limit.usable)}: too much)" if limit is not None and not limit.holds(used) else ""
    return f"{kind} {formatting.size(used)}{over}"
