"""Measure the cost of collectives in this process group, the overhead of DDP, and the contention with computing.

All ranks call these functions together. Times are wall time, because collectives mostly wait. With nccl, tensors are
in GPU memory, and DDP overhead and contention aren't measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bitwright.core.process_group import keep_group
from bitwright.profiling.device_profile import CollectiveCost
from bitwright.profiling.timing import fit, gc_disabled, typical, yardstick

_SIZES = (1 << 10, 1 << 13, 1 << 16, 1 << 18, 1 << 20, 1 << 21, 1 << 22, 1 << 24)  # bytes
_LONG, _TOO_LONG = 0.03, 0.5  # seconds
_ENOUGH = 1 << 20  # bytes
_LAYERS = 30
_MESSAGES = 4  # of 4 MB, while contention is measured


def _place() -> torch.device:
    """Where the group's tensors have to be."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _now() -> float:
    """The time when all that was begun is done: on a GPU calls come back before."""
    if dist.get_backend() == "nccl":
        torch.cuda.synchronize()
    return time.perf_counter()


class Collectives:
    """Samples of all_reduce and broadcast over a range of sizes, round by round, beside whatever else is measured."""

    def __init__(self) -> None:
        self.taken: dict[tuple[str, int], list[float]] = {
            (operation, size): [] for operation in ("all_reduce", "broadcast") for size in _SIZES
        }
        self.tensors = {size: torch.zeros(size // 4, device=_place()) for size in _SIZES}
        self.times: dict[tuple[str, int], int] = {}
        """How often each is done in a row: a machine that was idle has strength for one (a quota that wasn't used)."""

    def round(self) -> None:
        """Each for a while; all ranks together."""
        for (operation, size), taken in self.taken.items():
            times = self.times.get((operation, size), 1)
            if not times:
                continue
            dist.barrier()
            start = _now()
            for _ in range(times):
                _run(operation, self.tensors[size])
            taken.append((_now() - start) / times)
            if (operation, size) not in self.times:
                slowest = torch.tensor(taken[-1], device=_place())
                dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
                seconds = float(slowest)
                # on a slow link the line is known without the largest ones
                waste = seconds > _TOO_LONG and size > _ENOUGH
                self.times[(operation, size)] = 0 if waste else int(min(64.0, 1 + _LONG / seconds))

    def costs(self, *, warm: int = 2) -> list[CollectiveCost]:
        """latency + bytes · per_byte, the same on all ranks."""
        found = []
        for operation in ("all_reduce", "broadcast"):
            sizes = [size for size in _SIZES if self.times[(operation, size)]]
            seconds = [self._of_last(operation, size, warm) for size in sizes]
            line = fit([(float(size), 1.0) for size in sizes], seconds)
            found.append(
                CollectiveCost.model_validate(
                    {
                        "operation": operation,
                        "backend": dist.get_backend(),
                        "world": dist.get_world_size(),
                        "per_byte": line.coefficients[0],
                        "latency": line.coefficients[1],
                        "r2": line.r2,
                        "held_out": line.held_out,
                    }
                )
            )
        return found

    def _of_last(self, operation: str, size: int, warm: int) -> float:
        """Seconds as the rank sees them that comes last and waits for nobody."""
        taken = torch.tensor(self.taken[(operation, size)][warm:], device=_place())
        # a broadcast's root only sends: what counts is when all have it
        dist.all_reduce(taken, op=dist.ReduceOp.MIN if operation == "all_reduce" else dist.ReduceOp.MAX)
        return typical(taken.tolist())


def measure_collectives(*, rounds: int = 9) -> list[CollectiveCost]:
    """All in one go."""
    samples = Collectives()
    with gc_disabled():
        for _ in range(rounds + 2):
            samples.round()
    return samples.costs()


def _run(operation: str, tensor: Tensor) -> None:
    if operation == "all_reduce":
        dist.all_reduce(tensor)
    else:
        dist.broadcast(tensor, src=0)


def measure_contention(*, rounds: int = 9) -> dict[str, float]:
    """What this rank's computing and the group's collectives take from each other while both are under way."""
    alone, beside, quiet, busy = [], [], [], []
    tensor = torch.zeros(1 << 20)
    with gc_disabled():
        for number in range(rounds + 2):
            dist.barrier()
            computing = _several()
            dist.barrier()
            sending = _sent(tensor)
            dist.barrier()
            work: Any = [dist.all_reduce(tensor, async_op=True) for _ in range(_MESSAGES)]
            start = time.perf_counter()
            computed, done = 0, None
            while done is None:  # as much computing as goes beside the collectives
                yardstick(time.perf_counter)
                computed += 1
                if all(w.is_completed() for w in work):
                    done = time.perf_counter() - start
            for w in work:
                w.wait()
            if number >= 2:
                alone.append(computing)
                beside.append(done / computed)
                quiet.append(sending)
                busy.append(done)
    lost = 1 - statistics.median(alone) / statistics.median(beside)
    longer = statistics.median(busy) / statistics.median(quiet)
    return {"contention": max(0.0, min(0.95, lost)), "stretch": max(1.0, longer)}


def _sent(tensor: Tensor) -> float:
    start = time.perf_counter()
    work: Any = [dist.all_reduce(tensor, async_op=True) for _ in range(_MESSAGES)]
    for w in work:
        w.wait()
    return time.perf_counter() - start


def _several(count: int = 4) -> float:
    return statistics.fmean(yardstick(time.perf_counter) for _ in range(count))


def measure_ddp(collective: CollectiveCost, *, rounds: int = 15) -> dict[str, float]:
    """What DDP adds to a forward, and to each gradient, from a chain of tiny layers."""
    data = torch.randn(4, 4)
    plain = nn.Sequential(*(nn.Linear(4, 4) for _ in range(_LAYERS)))
    shared = DistributedDataParallel(nn.Sequential(*(nn.Linear(4, 4) for _ in range(_LAYERS))))
    keep_group(shared)
    rows = []
    with gc_disabled():
        for number in range(rounds + 3):
            dist.barrier()
            alone, ours = _pass(plain, data), _pass(shared, data)
            if number >= 3:
                rows.append((ours[0] - alone[0], ours[1] - alone[1]))
    forward, backward = (statistics.median(column) for column in zip(*rows, strict=True))
    gradients = 2 * _LAYERS
    sent = collective.latency + collective.per_byte * 4 * 20 * _LAYERS
    return {"ddp_forward": max(0.0, forward), "ddp_gradient": max(0.0, (backward - sent) / gradients)}


def _pass(model: Callable[[Tensor], Tensor], data: Tensor) -> tuple[float, float]:
    start = time.perf_counter()
    loss = model(data).sum()
    middle = time.perf_counter()
    loss.backward()
    return middle - start, time.perf_counter() - middle


def group_fact(name: str) -> str:
    """What a store calls something about this group: groups of other sizes have facts of their own."""
    return f"{name} {dist.get_backend()} {dist.get_world_size()}"


def measure_group() -> dict[str, Any]:
    """Everything that a group of processes adds to a profile's facts."""
    collectives = measure_collectives()
    facts: dict[str, Any] = {group_fact("collectives"): [cost.model_dump() for cost in collectives]}
    if dist.get_backend() != "nccl":
        facts[group_fact("ddp")] = {**measure_ddp(collectives[0]), **measure_contention()}
    return facts


def group_lacks(facts: Mapping[str, Any]) -> bool:
    """Whether this process is in a group that some rank's facts don't have; the same answer on all ranks."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
        return False
    lacks = torch.tensor(float(group_fact("collectives") not in facts), device=_place())
    dist.all_reduce(lacks, op=dist.ReduceOp.MAX)
    return bool(lacks)


def group_facts(facts: Mapping[str, Any]) -> tuple[list[Any], dict[str, float]]:
    """Collectives of all groups; what DDP adds, from the largest: a host has one figure."""
    lists = [fact for name, fact in facts.items() if name.startswith("collectives ")]
    hosts = {int(name.split()[-1]): fact for name, fact in facts.items() if name.startswith("ddp ")}
    return [cost for found in lists for cost in found], hosts[max(hosts)] if hosts else {}
