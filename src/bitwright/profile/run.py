"""`profile(variants, …)`: everything about this device that predictions need, from a file of samples that can grow."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bitwright.errors import BitwrightError
from bitwright.profile.casts import DTYPES, measure_casts
from bitwright.profile.device import CastCost, CollectiveCost, DeviceProfile, Host, MemoryFacts, TensorsCost
from bitwright.profile.host import measure_host, measure_tensors
from bitwright.profile.step import Batch, Clock, Loss
from bitwright.profile.store import SampleStore
from bitwright.profile.sweep import Variant, measure

Progress = Callable[[str, int, int], None]


def profile(
    variants: Sequence[Variant],
    batch: Batch,
    loss: Loss,
    *,
    store: SampleStore | None = None,
    clock: Clock = "wall",
    rounds: int = 30,
    fit_casts: bool = True,
    progress: Progress | None = None,
) -> DeviceProfile:
    """Measure what the store doesn't have yet, and give all that it has."""
    if clock == "cpu" and torch.get_num_threads() > 1:
        raise BitwrightError(
            "the clock `cpu` counts one thread only",
            value=torch.get_num_threads(),
            fix="set OMP_NUM_THREADS=1, or use the clock `wall`",
        )
    store = store or open_store(None, clock)
    tell = progress or (lambda words, done, total: None)
    facts = store.facts
    if "host" not in facts:
        tell("the host's gaps", 0, 1)
        store.add({"facts": {"host": measure_host(clock, rounds=rounds).model_dump()}})
    host = Host.model_validate(facts["host"])
    # Before what follows here has changed the allocator's habits: a trainer's process would be as this one is now.
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
    if "process" not in facts:
        store.add({"facts": {"process": _process_bytes(variants)}})
    if "tensors" not in facts:
        tell("optimizers", 0, 1)
        store.add({"facts": {"tensors": [cost.model_dump() for cost in measure_tensors(clock, rounds=min(rounds, 9))]}})
    wanted = [*casts, *DTYPES] if fit_casts else []
    for number, cast in enumerate(wanted):
        if f"cast {cast.kind}" not in facts:
            tell("casts", number, len(wanted))
            for cost in measure_casts([cast], clock):
                store.add({"facts": {f"cast {cost.kind}": cost.model_dump()}})
    return assemble(store, clock)


def assemble(store: SampleStore, clock: Clock) -> DeviceProfile:
    """A profile of all that is in the store."""
    facts = store.facts
    speed = statistics.median(store.yardsticks) if store.yardsticks else 0.0
    casts = [CastCost.model_validate(fact) for name, fact in facts.items() if name.startswith("cast ")]
    return DeviceProfile(
        bitwright_profile=1,
        device=device_name(),
        clock=clock,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        operators=list(store.costs().values()),
        casts=casts,
        tensors=[TensorsCost.model_validate(fact) for fact in facts.get("tensors", [])],
        collectives=[CollectiveCost.model_validate(fact) for fact in facts.get("collectives", [])],
        host=Host.model_validate({**facts.get("host", {}), **facts.get("ddp", {}), "yardstick": speed}),
        memory=MemoryFacts(process=facts.get("process", 0), limit=_memory_limit()),
    )


def open_store(path: Path | None, clock: Clock) -> SampleStore:
    """The samples of this device: another's aren't mixed with them."""
    about: dict[str, Any] = {
        "device": device_name(),
        "clock": clock,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    return SampleStore(path, circumstances=about)


def device_name() -> str:
    """What to call this device."""
    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"{model}, {torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}"


def resident_bytes() -> int:
    """What this process has in memory now; 0 where nobody tells."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _process_bytes(variants: Sequence[Variant]) -> int:
    """This process without its models, their gradients and the optimizers' momenta."""
    ours = sum(3 * p.numel() * p.element_size() for variant in variants for p in variant.model.parameters())
    return max(0, resident_bytes() - ours)


def _memory_limit() -> int | None:
    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory)
    try:
        return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (ValueError, OSError):
        return None
