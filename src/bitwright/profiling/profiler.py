"""Profile this device: measure model variants within real training steps, and the facts about the machine.

Samples are kept in a file, so that an interrupted run can resume.
"""

from __future__ import annotations

import hashlib
import os
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.core import __version__
from bitwright.core.arguments import Count, strict
from bitwright.core.environment import cpu_name, peak_resident_bytes, reset_peak_memory, resident_bytes
from bitwright.core.errors import BitwrightError
from bitwright.core.files import cache_folder
from bitwright.profiling.device_profile import CastCost, CollectiveCost, DeviceProfile, Host, MemoryFacts, TensorsCost
from bitwright.profiling.execution import Cast
from bitwright.profiling.microbenchmarks import COLD, DTYPES, measure_casts, measure_tensors
from bitwright.profiling.overhead import group_facts, group_lacks, measure_group, measure_host
from bitwright.profiling.profiled_step import CLOCKS, Clock, TimedStep, Variant
from bitwright.profiling.sample_store import SampleStore
from bitwright.profiling.step_graph import record_step
from bitwright.profiling.step_timer import Key, StepTimer, gc_disabled, timer_overhead, yardstick
from bitwright.quantizers import find_attachment
from bitwright.quantizers.compiled import SMALL, CompiledKernel, can_run_compiled
from bitwright.training.config import StepSettings
from bitwright.training.step import Batch
from bitwright.workload import Loss

_WARM = 3  # steps before the first measurement: compilation, lazily created state


def measure(
    variants: Sequence[Variant],
    batch: Batch,
    loss: Loss,
    store: SampleStore,
    *,
    clock: Clock,
    rounds: int = 30,
    host: Host | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Cast]:
    """Fill the store and return all kinds of casts. Variants whose keys are all known aren't run again."""
    host = host or Host()
    running: list[tuple[StepTimer, TimedStep]] = []
    casts: dict[str, Cast] = {}
    for variant in variants:
        variant.model.train()
        step = TimedStep(variant.model, [batch], loss, variant.settings, clock=clock)
        timer = StepTimer(variant.model, variant.plan, variant.settings, CLOCKS[clock], host=host)
        keys = _look(timer, step, store)
        casts.update({cast.kind: cast for execution in timer.executions.values() for cast in execution.casts})
        if store.rounds(keys) < rounds:
            for _ in range(_WARM):
                step()
            running.append((timer, step))
    done = 0
    paused = pauses(clock)  # a pause of one step would be taken for overhead of the timer
    with gc_disabled():
        while running:
            for timer, step in list(running):
                store.add({"yardstick": yardstick(CLOCKS[clock])})
                plain, sample = step.settled(), timer.run(step)  # another variant has run since
                overhead = None if paused else timer_overhead(timer, sample, plain)
                store.add_round(sample, wanted=rounds, overhead=overhead)
                if store.rounds(sample.calls) >= rounds:
                    running.remove((timer, step))
            done += 1
            if progress is not None:
                progress(min(done, rounds))
    return list(casts.values())


def _look(timer: StepTimer, step: TimedStep, store: SampleStore) -> list[Key]:
    """Run one step to find the calls and the tensors that they save."""
    sample = timer.run(step, saving=True)
    if any(key not in store.saved for key in sample.saved):
        store.add_saved(sample)
    return list(sample.calls)


Progress = Callable[[str, int, int], None]


@strict
def profile_variants(
    variants: Sequence[Variant],
    batch: Batch,
    loss: Loss,
    *,
    store: SampleStore | None = None,
    clock: Clock = "wall",
    rounds: Count = 30,
    fit_casts: bool = True,
    progress: Progress | None = None,
) -> DeviceProfile:
    """Measure what the store lacks and return a profile of all its samples. In a process group, all ranks call this."""
    if clock == "cpu" and torch.get_num_threads() > 1:
        raise BitwrightError(
            "the clock `cpu` counts one thread only",
            value=torch.get_num_threads(),
            fix="set OMP_NUM_THREADS=1, or use the clock `wall`",
            code="clock-needs-one-thread",
        )
    for variant in variants:
        check_device(variant.model)
    store = store or open_store(None, clock)
    tell = progress or (lambda words, done, total: None)
    facts = store.facts
    if "process" not in facts:  # measured first; later, the memory of steps would be counted twice
        store.add({"facts": {"process": _process_bytes(variants)}})
    if "compiler" not in facts and any(find_attachment(variant.model) is not None for variant in variants):
        store.add({"facts": {"compiler": compiler_bytes()}})
    if "host" not in facts:
        tell("gaps between operators", 0, 1)
        store.add({"facts": {"host": measure_host(clock, rounds=rounds).model_dump()}})
    host = Host.model_validate(facts["host"])
    # Measure steps first, because later measurements change the state of the allocator.
    casts = measure(
        variants,
        batch,
        loss,
        store,
        clock=clock,
        rounds=rounds,
        host=host,
        progress=lambda done: tell("steps", done, rounds),
    )
    between = _touched(variants[0].model, batch, loss)
    if f"tensors {between}" not in facts:
        tell("optimizers", 0, 1)
        costs = measure_tensors(clock, rounds=min(rounds, 9), between=between)
        store.add({"facts": {f"tensors {between}": [cost.model_dump() for cost in costs]}})
    if facts.get("tensors") != facts[f"tensors {between}"]:  # use the costs for the current model
        store.add({"facts": {"tensors": facts[f"tensors {between}"]}})
    wanted = [*casts, *DTYPES] if fit_casts else []
    for number, cast in enumerate(wanted):
        if f"cast {cast.kind}" not in facts:
            tell("casts", number, len(wanted))
            for cost in measure_casts([cast], clock):
                store.add({"facts": {f"cast {cost.kind}": cost.model_dump()}})
    if group_lacks(facts):
        tell("collectives", 0, 1)
        store.add({"facts": measure_group()})
    return assemble(store, clock)


def assemble(store: SampleStore, clock: Clock) -> DeviceProfile:
    """Return the profile of all samples in the store."""
    facts = store.facts
    speed = statistics.median(store.yardsticks) if store.yardsticks else 0.0
    casts = [CastCost.model_validate(fact) for name, fact in facts.items() if name.startswith("cast ")]
    collectives, ddp = group_facts(facts)
    return DeviceProfile(
        bitwright_profile=1,
        device=device_name(),
        clock=clock,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        operators=list(store.costs().values()),
        casts=casts,
        tensors=[TensorsCost.model_validate(fact) for fact in facts.get("tensors", [])],
        collectives=[CollectiveCost.model_validate(fact) for fact in collectives],
        host=Host.model_validate({**facts.get("host", {}), **ddp, "yardstick": speed}),
        memory=MemoryFacts(process=facts.get("process", 0), compiler=facts.get("compiler", 0), limit=memory_limit()),
    )


def open_store(path: Path | None, clock: Clock) -> SampleStore:
    """Open the samples of this device; raise if the file has those of another one."""
    return SampleStore(path, circumstances=circumstances(clock))


def check_device(model: nn.Module) -> None:
    """Reject models on a GPU: the host's clock would measure only the launches of their kernels."""
    places = sorted({p.device.type for p in model.parameters()} - {"cpu"})
    if places:
        raise BitwrightError(
            "only models on the CPU can be measured",
            value=places[0],
            fix="record a torch.profiler trace of your steps there, and import it: bitwright profile --trace run.json",
            code="model-not-on-cpu",
        )


def training_peak(model: nn.Module, batch: Batch, loss: Loss, *, steps: int = 5) -> int:
    """The peak memory of this process within a few steps, without the weights. 0 if it can't be measured.

    The model is restored afterwards. Call this before other measurements, because the heap that they leave would count
    (INT8 steps after float steps needed 7 % more than in their own process). Several steps are needed because the heap
    grows by gaps between blocks of different sizes.
    """
    peak_before, was_reset = peak_resident_bytes(), reset_peak_memory()
    training = model.training
    before: dict[str, Tensor] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    step = TimedStep(model.train(), [batch], loss, StepSettings())
    for _ in range(steps):
        step()
    step.optimizer.zero_grad(set_to_none=True)
    peak = peak_resident_bytes()
    model.load_state_dict(before)
    model.train(training)
    if not was_reset and peak == peak_before:  # earlier work of this process had a higher peak
        return 0
    return max(0, peak - sum(tensor.numel() * tensor.element_size() for tensor in before.values()))


def compiler_bytes() -> int:
    """The memory of torch's compiler in this process; 0 if it is already loaded, or can't be."""
    if not can_run_compiled() or "torch._inductor.compile_fx" in sys.modules:
        return 0
    before = resident_bytes()
    CompiledKernel(lambda x: (x + 1.0).round()).compiled(torch.ones(SMALL))
    return max(0, resident_bytes() - before)


def _process_bytes(variants: Sequence[Variant]) -> int:
    """The memory of this process without its models."""
    ours = sum(p.numel() * p.element_size() for variant in variants for p in variant.model.parameters())
    return max(0, resident_bytes() - ours)


def _touched(model: nn.Module, batch: Batch, loss: Loss) -> int:
    """Bytes that a step touches between two runs of the optimizer, as a power of two of at most `COLD`."""
    if find_attachment(model) is not None:
        return COLD
    step = record_step(model, batch, loss)
    activations = sum(storage.bytes for storage in step.storages if storage.kind == "op")
    touched = 2 * activations + step.input_bytes + sum(spec.bytes for spec in step.parameters.values())
    return min(COLD, 1 << max(20, (touched - 1).bit_length()))


# -- this device -------------------------------------------------------------------------------------------------


def device_name() -> str:
    """The name of the processor and the number of threads. Steps are measured on the CPU, even if there is a GPU."""
    return f"{cpu_name()}, {torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}"


def circumstances(clock: Clock) -> dict[str, Any]:
    """Facts that all samples of a file have in common, because times depend on them."""
    return {
        "device": device_name(),
        "clock": clock,
        "threads": torch.get_num_threads(),
        "quota": cpu_quota(),
        "torch": torch.__version__,
        "bitwright": __version__,
    }


def samples_file(clock: Clock) -> Path:
    """The file with the samples of this device, which all models share.

    It is in `BITWRIGHT_CACHE`, or by default in the user's cache folder.
    """
    about = circumstances(clock)
    words = re.sub(r"[^A-Za-z0-9.]+", "-", about["device"]).strip("-").lower()
    number = hashlib.sha256(repr(sorted(about.items())).encode()).hexdigest()[:8]
    return cache_folder() / "samples" / f"{words}-{clock}-{number}.jsonl"


def of_rank(path: Path, rank: int) -> Path:
    """The file of one process of a group; rank 0 uses the given name.

    >>> str(of_rank(Path("here.json"), 0)), str(of_rank(Path("here.json"), 1))
    ('here.json', 'here.rank1.json')
    """
    return path if rank == 0 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def cpu_quota() -> float | None:
    """The number of cores that this process may use, for example in a container; None without a limit."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    mounted = Path("/sys/fs/cgroup")
    for line in lines:
        _, controllers, group = line.split(":", 2)
        try:
            if "cpu" in controllers.split(","):
                folder = mounted / "cpu" / group.lstrip("/")
                quota = (folder / "cpu.cfs_quota_us").read_text(encoding="ascii")
                period = (folder / "cpu.cfs_period_us").read_text(encoding="ascii")
            elif controllers == "":
                quota, period = (mounted / group.lstrip("/") / "cpu.max").read_text(encoding="ascii").split()
            else:
                continue
            if float(quota) > 0:
                return float(quota) / float(period)
        except (OSError, ValueError):  # no such file, or `max`
            continue
    return None


def pauses(clock: Clock) -> bool:
    """Whether this clock also counts pauses of a process that has used up its CPU quota."""
    quota = cpu_quota()
    return clock == "wall" and quota is not None and quota < torch.get_num_threads()


def memory_limit() -> int | None:
    """The memory of this machine in bytes; None if unknown."""
    try:
        return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (ValueError, OSError):
        return None
