"""`bitwright profile`: measure this device with the training steps of a workload."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bitwright.cli.data import open_workload
from bitwright.cli.options import WorkloadArg
from bitwright.cli.out import Out
from bitwright.cli.step_options import BatchOption, ClockOption, LayoutOption
from bitwright.cli.verb import verb
from bitwright.core.errors import BitwrightError

if TYPE_CHECKING:
    from bitwright.profiling import DeviceProfile, StepGraph

_ROUNDS = 30
_UNCERTAIN = 0.1


@verb(
    "profile",
    examples="""
    bitwright profile digits-untrained --precision int8 -o device.json
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
    precision: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Also measure quantized training: int8, w4a8, …; repeatable."),
    ] = None,
    plan: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Also measure training under a plan file; repeatable.")
    ] = None,
    kernel: Annotated[
        list[str] | None,
        typer.Option(metavar="FORMAT", help="Also measure kernels: int8, int8/stochastic/weight, bf16, …; repeatable."),
    ] = None,
    amp: Annotated[
        list[str] | None, typer.Option(help="Also measure under autocast with bf16 or fp16; repeatable.")
    ] = None,
    batch: BatchOption = None,
    channels_last: LayoutOption = False,
    half_batch: Annotated[
        bool, typer.Option("--half-batch", help="Also measure half of the batch, for planners that choose batches.")
    ] = False,
    rounds: Annotated[int, typer.Option(min=3, help="Measured steps of each plan.")] = _ROUNDS,
    clock: ClockOption = "wall",
    casts: Annotated[
        bool, typer.Option("--casts/--no-casts", help="Fit the times of casts by size, for shapes of other models.")
    ] = True,
    cache: Annotated[
        Path | None,
        typer.Option(help="The device's samples (default: a file in BITWRIGHT_CACHE or the user's cache folder)."),
    ] = None,
    graph: Annotated[
        Path | None, typer.Option(help="Also write the recorded step to this file.", show_default=False)
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Import times from this torch.profiler trace instead.", show_default=False)
    ] = None,
    published: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE",
            help="Derive times from a data sheet instead: nvidia-t4, nvidia-v100, nvidia-a100.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Measure operators, casts, optimizers and the host within real training steps; write a device profile.

    Earlier measurements, also of other models, are taken from the cache. Rerun an interrupted command to resume. Under
    torchrun, collectives are measured too, and each rank writes its own profile: device.json, device.rank1.json.
    """
    from bitwright.cluster.measurement import profile
    from bitwright.importers.trace import import_trace
    from bitwright.profiling.profiler import of_rank
    from bitwright.profiling.step import WorkloadStep
    from bitwright.training.distributed import process_group

    measuring = {
        "--cache": cache is not None,
        "--rounds": rounds != _ROUNDS,
        "--clock": clock != "wall",
        "--no-casts": not casts,
        "torchrun": int(os.environ.get("WORLD_SIZE", "1")) > 1,
    }
    planning = {"--precision": precision, "--plan": plan, "--kernel": kernel, "--amp": amp, "--half-batch": half_batch}
    if trace is not None:
        _reject("--trace", {**planning, "--published": published is not None, **measuring})
    elif published is not None:
        _reject("--published", measuring)
    with process_group() as ranks:
        out = out if ranks.first else Out(json=False, quiet=True)
        found = open_workload(out, workload)
        if trace is not None:
            recorded = WorkloadStep.of(found, batch, channels_last=channels_last).record()
            made = import_trace(trace, recorded)
        else:
            amp_types: list[Any] = amp or []
            chosen_clock: Any = clock
            with out.units() as tell:
                made = profile(
                    found,
                    plans=[*(precision or []), *(plan or [])],
                    kernels=kernel or [],
                    amp=amp_types,
                    batch=batch,
                    half_batch=half_batch,
                    channels_last=channels_last,
                    rounds=rounds,
                    clock=chosen_clock,
                    fit_casts=casts,
                    cache=cache,
                    published=published,
                    progress=lambda done, total, words: tell(words, done, total or 1),
                )
            recorded = WorkloadStep.of(found, batch, channels_last=channels_last).record()
        if graph is not None and ranks.first:
            recorded.save(graph)
        output = of_rank(output, ranks.rank)
        made.save(output)
        _show(out, made, output, recorded)
        if ranks.several:
            files = f"{output}, {of_rank(output, 1)}{', …' if ranks.world > 2 else ''}"
            out.say(f"each rank has its own profile: {files}")


def _reject(flag: str, others: Mapping[str, object]) -> None:
    ignored = [name for name, given in others.items() if given]
    if ignored:
        raise BitwrightError(
            f"{flag} doesn't measure, so it would ignore these options",
            where=", ".join(ignored),
            fix=f"remove them, or profile without {flag}",
            code="ignored-options",
        )


def _show(out: Out, made: DeviceProfile, output: Path, recorded: StepGraph) -> None:
    from bitwright.profiling.device_profile import operators_of_step, poor_fits, relative_uncertainty

    own = operators_of_step(made, recorded)
    out.data({"file": str(output), **made.model_dump(exclude={"operators"}), "operators": len(made.operators)})
    out.table(
        ["slowest operators", "format", "#forward", "#backward", "#±"],
        [
            (
                cost.operator[:90],
                cost.format,
                f"{1e3 * cost.forward.seconds:.3f} ms",
                "" if cost.backward is None else f"{1e3 * cost.backward.seconds:.3f} ms",
                f"{100 * spread:.1f} %" if (spread := relative_uncertainty([cost])) else "",
            )
            for cost in sorted(own, key=lambda cost: -cost.forward.seconds)[:10]
        ],
    )
    if made.note:
        out.say(made.note)
    spread = relative_uncertainty(own)
    if spread > _UNCERTAIN:
        fix = "more --rounds" if made.clock == "cpu" else "--clock cpu"
        out.note(f"times are uncertain by ±{100 * spread:.0f} %: repeat on an idle machine, or with {fix}")
    bad = poor_fits(made)
    if bad:
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        out.note(f"poor fits, so times of other sizes are rough: {'; '.join(bad[:3])}{more}")
    others = len(made.operators) - len(own)
    known = f", {len(own)} of them from this model" if others else ""
    out.say(f"{output}: {len(made.operators)} operators and casts of {made.device}{known}")
