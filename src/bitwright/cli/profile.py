"""`bitwright profile`: measure this device with the steps of a workload."""

from __future__ import annotations

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
from bitwright.errors import BitwrightError
from bitwright.plan import Plan
from bitwright.profile import DeviceProfile, StepSettings, halves, open_store, profile, record_step
from bitwright.profile.import_trace import import_trace
from bitwright.profile.published import published as from_data_sheet
from bitwright.profile.step import CLOCKS, Clock
from bitwright.profile.way import Amp


@verb(
    "profile",
    examples="""
    bitwright profile digits-untrained --quantize int8 -o device.json
    bitwright profile digits-untrained --kernel int8 --kernel int8/stochastic/weight -o device.json
    bitwright profile resnet20-cifar10 --batch 32 --amp bf16 -o device.json
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
    rounds: Annotated[int, typer.Option(min=3, help="Steps of each plan, by turns.")] = 30,
    clock: ClockOption = "wall",
    casts: Annotated[
        bool, typer.Option("--casts/--no-casts", help="Fit casts by size, for shapes that no model has shown.")
    ] = True,
    cache: Annotated[
        Path | None,
        typer.Option("--cache", help="The device's samples (default: the profile's name with .samples.jsonl)."),
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
    """
    if clock not in CLOCKS:
        raise BitwrightError("unknown clock", where="--clock", value=clock, fix="use wall or cpu")
    for word in amp or []:
        if word not in ("bf16", "fp16"):
            raise BitwrightError("unknown autocast type", where="--amp", value=word, fix="use bf16 or fp16")
    found = open_workload(out, workload)
    pair, loss = training_batch(found, batch, channels_last=channels_last)
    recorded = record_step(found.model, pair, loss, name=found.name)
    if graph is not None:
        recorded.save(graph)
    if trace is not None:
        made = import_trace(trace, recorded)
    else:
        plans: list[Plan | None] = [None, *(plan_of(found, word) for word in quantize or [])]
        plans += [kernels_of(found, word) for word in kernel or []]
        plans += [half for plan in plans if plan is not None for half in halves(plan)]
        types: list[Amp | None] = [None, *(cast(Amp, word) for word in amp or [])]
        variants = [variant_of(found, plan, pair, StepSettings(amp=kind)) for plan in plans for kind in types]
        batches = [pair, half_of((pair, loss))[0]] if half_batch else [pair]
        if published is not None:
            made = from_data_sheet(published, variants, batches, loss)
        else:
            store = open_store(cache or output.with_suffix(".samples.jsonl"), cast(Clock, clock))
            for own in batches:
                with out.units() as tell:
                    made = profile(
                        variants,
                        own,
                        loss,
                        store=store,
                        clock=cast(Clock, clock),
                        rounds=rounds,
                        fit_casts=casts,
                        progress=tell,
                    )
    made.save(output)
    _show(out, made, output)


_UNSURE = 0.1


def _spread(made: DeviceProfile) -> float:
    """Half of the confidence interval, of the time, where the time goes."""
    known = [c.forward for c in made.operators if c.forward.low is not None and c.forward.high is not None]
    whole = sum(timing.seconds for timing in known)
    return sum((t.high or 0.0) - (t.low or 0.0) for t in known) / 2 / whole if whole else 0.0


def _show(out: Out, made: DeviceProfile, output: Path) -> None:
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
            for cost in sorted(made.operators, key=lambda cost: -cost.forward.seconds)[:10]
        ],
    )
    if made.note:
        out.say(made.note)
    spread = _spread(made)
    if spread > _UNSURE:
        out.note(f"times are known to ±{100 * spread:.0f} % only: repeat on a quiet machine, or with --clock cpu")
    out.say(f"{output}: {len(made.operators)} operators and casts of {made.device}")
