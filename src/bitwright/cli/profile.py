"""`bitwright profile`: measure this device with the steps of a workload."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, cast

import typer

from bitwright.cli.data import open_workload
from bitwright.cli.options import WorkloadArg
from bitwright.cli.out import Out
from bitwright.cli.stepping import (
    BatchOption,
    ClockOption,
    LayoutOption,
    half_of,
    kernels_of,
    plan_of,
    training_batch,
    variant_of,
)
from bitwright.cli.verb import verb
from bitwright.cluster import predict
from bitwright.core.errors import BitwrightError
from bitwright.core.interrupts import Interrupted
from bitwright.importers.trace import import_trace
from bitwright.plan import Plan
from bitwright.profiling import (
    DeviceProfile,
    SampleStore,
    StepGraph,
    StepSettings,
    halves,
    open_store,
    profile,
    record_step,
)
from bitwright.profiling.device_profile import CollectiveCost, Line, OperatorCost, TensorsCost
from bitwright.profiling.execution import Amp
from bitwright.profiling.machine import of_rank, samples_file
from bitwright.profiling.profiler import check_device, training_peak
from bitwright.profiling.published import published as from_data_sheet
from bitwright.profiling.step import CLOCKS, Clock
from bitwright.training.distributed import process_group

_ROUNDS = 30
_UNSURE = 0.1  # half of the intervals, of the time
_R2, _HELD_OUT = 0.9, 0.3  # a line is worse than that: it is said


@verb(
    "profile",
    examples="""
    bitwright profile digits-untrained --quantize int8 -o device.json
    bitwright profile digits-untrained --kernel int8 --kernel int8/stochastic/weight -o device.json
    bitwright profile resnet20-cifar10 --batch 32 --amp bf16 -o device.json
    torchrun --nproc-per-node 2 -m bitwright profile digits-untrained -o device.json
    bitwright profile digits-untrained --trace my_run.json -o gpu.json
    bitwright profile digits-untrained --published nvidia-t4 --kernel int8 -o t4.json
    """,
)
def profile_(
    out: Out,
    workload: WorkloadArg,
    output: Annotated[Path, typer.Option("--output", "-o", help="The profile to write.")] = Path("device.json"),
    quantize: Annotated[
        list[str] | None,
        typer.Option("--quantize", metavar="PRECISION", help="int8, w4a8, … or a plan.yaml; may be repeated."),
    ] = None,
    kernel: Annotated[
        list[str] | None,
        typer.Option("--kernel", metavar="FORMAT", help="int8, int8/stochastic/weight, bf16, …; may be repeated."),
    ] = None,
    amp: Annotated[
        list[str] | None, typer.Option("--amp", help="bf16 or fp16: measure under autocast, too; may be repeated.")
    ] = None,
    batch: BatchOption = None,
    channels_last: LayoutOption = False,
    half_batch: Annotated[
        bool,
        typer.Option("--half-batch", help="Measure half of the batch, too: for planners that choose batches."),
    ] = False,
    rounds: Annotated[int, typer.Option(min=3, help="Steps of each plan, by turns.")] = _ROUNDS,
    clock: ClockOption = "wall",
    casts: Annotated[
        bool, typer.Option("--casts/--no-casts", help="Fit casts by size, for shapes that no model has shown.")
    ] = True,
    cache: Annotated[
        Path | None,
        typer.Option(
            "--cache", help="The device's samples (default: in BITWRIGHT_CACHE, else the user's cache folder)."
        ),
    ] = None,
    graph: Annotated[
        Path | None, typer.Option("--graph", help="Write the recorded step here, too.", show_default=False)
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="Take times from this torch.profiler trace instead.", show_default=False),
    ] = None,
    published: Annotated[
        str | None,
        typer.Option(
            "--published",
            metavar="DEVICE",
            help="Derive times from a data sheet instead: nvidia-t4, nvidia-v100, nvidia-a100.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Measure operators, casts, optimizers and the host within real training steps; write a DeviceProfile.

    What was measured before, with this model or another, is taken from the cache; a run that was killed goes on.
    Under torchrun collectives are measured, too, and each rank has its own profile: device.json, device.rank1.json.
    """
    measuring = {
        "--cache": cache is not None,
        "--rounds": rounds != _ROUNDS,
        "--clock": clock != "wall",
        "--no-casts": not casts,
        "torchrun": int(os.environ.get("WORLD_SIZE", "1")) > 1,
    }
    planning = {"--quantize": quantize, "--kernel": kernel, "--amp": amp, "--half-batch": half_batch}
    if trace is not None:
        _refuse("--trace", {**planning, "--published": published is not None, **measuring})
    elif published is not None:
        _refuse("--published", measuring)
    if clock not in CLOCKS:
        raise BitwrightError("unknown clock", where="--clock", value=clock, fix="use wall or cpu")
    for word in amp or []:
        if word not in ("bf16", "fp16"):
            raise BitwrightError("unknown autocast type", where="--amp", value=word, fix="use bf16 or fp16")
    with process_group() as ranks:
        out = out if ranks.first else Out(json=False, quiet=True)
        found = open_workload(out, workload)
        pair, loss = training_batch(found, batch, channels_last=channels_last)
        peak = 0
        if trace is None and published is None:
            check_device(found.model)
            peak = training_peak(found.model, pair, loss)
        recorded = record_step(found.model, pair, loss, name=found.name)
        if graph is not None and ranks.first:
            recorded.save(graph)
        if trace is not None:
            made = import_trace(trace, recorded)
        else:
            plans: list[Plan | None] = [None, *(plan_of(found, word) for word in quantize or [])]
            plans += [kernels_of(found, word) for word in kernel or []]
            plans += [half for plan in plans if plan is not None for half in halves(plan)]
            types: list[Amp | None] = [None, *(cast(Amp, word) for word in amp or [])]
            variants = [variant_of(found, plan, pair, StepSettings(amp=kind)) for plan in plans for kind in types]
            batches = [half_of((pair, loss))[0], pair] if half_batch else [pair]  # the last one says what a step is
            if published is not None:
                made = from_data_sheet(published, variants, batches, loss)
            else:
                chosen = cast(Clock, clock)
                store = open_store(of_rank(cache or samples_file(chosen), ranks.rank), chosen)
                for own in batches:
                    with out.units() as tell, _telling_what_is_kept(store):
                        made = profile(
                            variants,
                            own,
                            loss,
                            store=store,
                            clock=chosen,
                            rounds=rounds,
                            fit_casts=casts,
                            progress=tell,
                        )
                made = _with_process(made, recorded, peak)
        output = of_rank(output, ranks.rank)
        made.save(output)
        _show(out, made, output, _own_operators(made, recorded))
        if ranks.several:
            out.say(f"each rank has its own: {output}, {of_rank(output, 1)}{', …' if ranks.world > 2 else ''}")


def _refuse(flag: str, others: Mapping[str, object]) -> None:
    """Options that would change nothing, all at once."""
    ignored = [name for name, given in others.items() if given]
    if ignored:
        raise BitwrightError(
            f"{flag} measures nothing, so that these would be ignored",
            where=", ".join(ignored),
            fix=f"leave them out, or profile without {flag}",
        )


@contextmanager
def _telling_what_is_kept(store: SampleStore) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as error:
        kept = f"no profile was written; {len(store.totals)} rounds are kept in {store.path}"
        raise Interrupted(str(error) or "interrupted", f"{kept}; rerun the command to resume") from None


def _with_process(made: DeviceProfile, recorded: StepGraph, peak: int) -> DeviceProfile:
    """What a training process of this model had in memory that its tensors don't explain."""
    memory = predict(recorded, Plan(), made).devices[0].memory
    if not peak or memory is None:
        return made
    facts = made.memory.model_copy(update={"process": max(0, peak - memory.peak)})
    return made.model_copy(update={"memory": facts})


#: Strides and number types, which differ under plans and autocast.
_VARYING = re.compile(r"@[\d,]*\d|\b[a-z]+\d+(?=\[)")


def _own_operators(made: DeviceProfile, recorded: StepGraph) -> list[OperatorCost]:
    """Those of the profiled model, whatever their formats: the cache has other models' as well."""
    own = {_VARYING.sub("", call.key()) for call in (*(op.call for op in recorded.ops), recorded.loss)}
    texts = "; ".join(own)
    found = []
    for cost in made.operators:
        text = _VARYING.sub("", cost.operator)
        if text in own if "(" in text else text.rstrip("+") in texts:  # a quantizer's tensor is some operator's
            found.append(cost)
    return found


def _spread(operators: Sequence[OperatorCost]) -> float:
    """Half of the confidence interval, of the time, where the time goes."""
    known = [c.forward for c in operators if c.forward.low is not None and c.forward.high is not None]
    whole = sum(timing.seconds for timing in known)
    return sum((t.high or 0.0) - (t.low or 0.0) for t in known) / 2 / whole if whole else 0.0


def _bad_lines(made: DeviceProfile) -> list[str]:
    """Fitted lines that don't say what was measured, each with how far it is off."""
    lines: list[tuple[str, Line | TensorsCost | CollectiveCost]] = [
        (f"{cost.kind} {way}", line)
        for cost in made.casts
        for way, found in (("forward", cost.forward), ("backward", cost.backward))
        for line in found
    ]
    lines += [(tensors.name, tensors) for tensors in made.tensors]
    lines += [(f"{sent.operation} of {sent.world}", sent) for sent in made.collectives]
    return [
        f"{name} (R² {line.r2:.2f}, {100 * (line.held_out or 0):.0f} % off at sizes held out)"
        for name, line in lines
        if line.r2 is not None and (line.r2 < _R2 or (line.held_out or 0) > _HELD_OUT)
    ]


def _show(out: Out, made: DeviceProfile, output: Path, own: Sequence[OperatorCost]) -> None:
    out.data({"file": str(output), **made.model_dump(exclude={"operators"}), "operators": len(made.operators)})
    out.table(
        ["slowest operators", "format", "#forward", "#backward", "#±"],
        [
            (
                cost.operator[:90],
                cost.format,
                f"{1e3 * cost.forward.seconds:.3f} ms",
                "" if cost.backward is None else f"{1e3 * cost.backward.seconds:.3f} ms",
                ""
                if cost.forward.low is None or cost.forward.high is None or not cost.forward.seconds
                else f"{50 * (cost.forward.high - cost.forward.low) / cost.forward.seconds:.1f} %",
            )
            for cost in sorted(own, key=lambda cost: -cost.forward.seconds)[:10]
        ],
    )
    if made.note:
        out.say(made.note)
    spread = _spread(own)
    if spread > _UNSURE:
        fix = "more --rounds" if made.clock == "cpu" else "--clock cpu"
        out.note(f"times are known to ±{100 * spread:.0f} % only: repeat on a quiet machine, or with {fix}")
    bad = _bad_lines(made)
    if bad:
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        out.note(f"lines that fit badly, so that other sizes are guessed: {'; '.join(bad[:3])}{more}")
    others = len(made.operators) - len(own)
    known = f", {len(own)} of them this model's" if others else ""
    out.say(f"{output}: {len(made.operators)} operators and casts of {made.device}{known}")
