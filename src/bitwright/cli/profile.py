"""`bitwright profile`: measure this device with the training steps of a workload."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from bitwright.cli.options import BatchOption, ChannelsLastOption, WorkloadArg, exclude, open_workload, option
from bitwright.cli.out import Out
from bitwright.cli.verb import verb

_ROUNDS = 30


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
    output: Annotated[Path, option("The profile to write.", "--output", "-o", show_default=True)] = Path("device.json"),
    precision: Annotated[
        list[str] | None, option("Also measure quantized training: int8, w4a8, …; repeatable.", metavar="NAME")
    ] = None,
    plan: Annotated[
        list[Path] | None, option("Also measure training under a plan file; repeatable.", metavar="FILE")
    ] = None,
    kernel: Annotated[
        list[str] | None,
        option("Also measure kernels: int8, int8/stochastic/weight, bf16, …; repeatable.", metavar="FORMAT"),
    ] = None,
    amp: Annotated[list[str] | None, option("Also measure under autocast with bf16 or fp16; repeatable.")] = None,
    batch: BatchOption = None,
    channels_last: ChannelsLastOption = False,
    half_batch: Annotated[
        bool, option("Also measure half of the batch, for planners that choose batches.", "--half-batch")
    ] = False,
    rounds: Annotated[int, option("Measured steps of each plan.", min=3, show_default=True)] = _ROUNDS,
    clock: Annotated[
        str,
        option("wall, or cpu: the CPU time of one thread, which other processes don't change.", show_default=True),
    ] = "wall",
    casts: Annotated[
        bool,
        option("Fit the times of casts by size, for shapes of other models.", "--casts/--no-casts", show_default=True),
    ] = True,
    cache: Annotated[
        Path | None,
        option("The device's samples (default: a file in BITWRIGHT_CACHE or the user's cache folder)."),
    ] = None,
    graph: Annotated[Path | None, option("Also write the recorded step to this file.")] = None,
    trace: Annotated[Path | None, option("Import times from this torch.profiler trace instead.")] = None,
    published: Annotated[
        str | None,
        option("Derive times from a data sheet instead: nvidia-t4, nvidia-v100, nvidia-a100.", metavar="DEVICE"),
    ] = None,
) -> None:
    """Measure operators, casts, optimizers and the host within real training steps; write a device profile.

    Earlier measurements, also of other models, are taken from the cache. Rerun an interrupted command to resume. Under
    torchrun, collectives are measured too, and each rank writes its own profile: device.json, device.rank1.json.
    """
    from bitwright.cluster.measurement import profile
    from bitwright.core.output_folder import locked_file
    from bitwright.importers.trace import import_trace
    from bitwright.profiling.device_profile import operators_of_step, quality_notes
    from bitwright.profiling.profiled_step import WorkloadStep
    from bitwright.profiling.profiler import of_rank
    from bitwright.training.distributed import process_group

    measuring = {
        "--cache": cache,
        "--rounds": rounds != _ROUNDS,
        "--clock": clock != "wall",
        "--no-casts": not casts,
        "torchrun": int(os.environ.get("WORLD_SIZE", "1")) > 1,
    }
    planning = {"--precision": precision, "--plan": plan, "--kernel": kernel, "--amp": amp, "--half-batch": half_batch}
    if trace is not None:
        exclude("--trace", {**planning, "--published": published, **measuring})
    elif published is not None:
        exclude("--published", measuring)
    with process_group() as ranks, locked_file(of_rank(output, ranks.rank)):
        out = out if ranks.first else Out(json=False, quiet=True)
        found = open_workload(out, workload)
        if trace is not None:
            recorded = WorkloadStep.of(found, batch, channels_last=channels_last).record()
            made = import_trace(trace, recorded)
        else:
            names: Any = {"amp": amp or [], "clock": clock}
            with out.progress("profiling") as progress:
                made = profile(
                    found,
                    plans=[*(precision or []), *(plan or [])],
                    kernels=kernel or [],
                    batch=batch,
                    half_batch=half_batch,
                    channels_last=channels_last,
                    rounds=rounds,
                    fit_casts=casts,
                    cache=cache,
                    published=published,
                    progress=progress,
                    **names,
                )
            recorded = WorkloadStep.of(found, batch, channels_last=channels_last).record()
        if graph is not None and ranks.first:
            recorded.save(graph)
        output = of_rank(output, ranks.rank)
        made.save(output)
        own = made.model_copy(update={"operators": operators_of_step(made, recorded)})
        out.show(own, output=output, operators=len(made.operators))
        for note in quality_notes(made, recorded):
            out.note(note)
        if ranks.several:
            files = f"{output}, {of_rank(output, 1)}{', …' if ranks.world > 2 else ''}"
            out.say(f"each rank has its own profile: {files}")
