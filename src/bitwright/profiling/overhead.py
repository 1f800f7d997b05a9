"""Measure what a step costs besides its operators: gaps between calls, collectives, DDP and contention.

All ranks of a process group call the functions about collectives together. Those times are wall time, because
collectives mostly wait. With nccl, tensors are in GPU memory, and DDP overhead and contention aren't measured.
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

from bitwright.core.formats import Format
from bitwright.plan import Plan, SiteSpec
from bitwright.profiling.cost_key import is_loss
from bitwright.profiling.device_profile import CollectiveCost, Host
from bitwright.profiling.microbenchmarks import timed, zero_grad_cost
from bitwright.profiling.profiled_step import CLOCKS, Clock, TimedStep, make_optimizer
from bitwright.profiling.step_timer import Sample, StepTimer, fit, gc_disabled, interleaved, typical, yardstick
from bitwright.ptq import ALONE, calibrate
from bitwright.quantizers import prepare
from bitwright.training.config import StepSettings
from bitwright.training.distributed import keep_group

_LINKS = 30  # links of the chain: so many that the fixed start of a step doesn't matter
_FEW = 3  # links of a short chain, which shows the fixed start of backward


def _chain(links: int = _LINKS) -> nn.Module:
    """A chain of tiny operators, two per link. Almost all of its time is overhead."""
    return nn.Sequential(*(layer for _ in range(links) for layer in (nn.Linear(4, 4), nn.Tanh())))


def _chain_plan() -> Plan:
    format = Format.parse("int8/tensor/sym")
    return Plan(sites={f"{2 * i}:input": SiteSpec(format=format, quantizer="lsq") for i in range(_LINKS)})


def measure_host(clock: Clock, *, rounds: int = 30) -> Host:
    """Measure the gaps between operators on a chain of tiny operators, with and without the timer in turn."""
    data = torch.randn(4, 4)
    batch = (data, torch.zeros(()))

    def loss(output: Tensor, _: Any) -> Tensor:
        return output.sum()

    settings = StepSettings(schedule=False)
    found: dict[str, float] = {}
    for name, links, plan in (("float", _LINKS, Plan()), ("prepared", _LINKS, _chain_plan()), ("few", _FEW, Plan())):
        model = _chain(links)
        if plan.sites:
            prepare(model, plan)
            calibrate(model, [data], group=ALONE)  # other ranks may not measure now
        model.train()
        step = TimedStep(model, [batch], loss, settings, clock=clock)
        timer = StepTimer(model, plan, settings, CLOCKS[clock])
        rows = []
        with gc_disabled():
            for number in range(rounds + 3):
                plain, seen = step.settled(), timer.run(step)
                if number >= 3:
                    rows.append(_row(plain, seen))
        medians = [statistics.median(column) for column in zip(*rows, strict=True)]
        found.update({f"{name} {key}": value for key, value in zip(_COLUMNS, medians, strict=True)})
    zero = zero_grad_cost(clock, min(rounds, 5))
    step_fixed = max(0.0, found["float other"] - zero.seconds(20 * _LINKS, 2 * _LINKS))
    added = max(0.0, found["prepared tanh"] - found["float tanh"])
    hooked = max(0.0, found["prepared linear"] - found["float linear"])
    engine, few = found["float engine"], found["few engine"]
    each = max(0.0, engine - few) / (2 * (_LINKS - _FEW))
    return Host(
        gap=found["float gap"],
        prepared_gap=found["prepared gap"],
        seen=added,
        hooked=hooked,
        hook=max(0.0, found["float hook"]),
        engine=max(0.0, engine - 2 * _LINKS * each),
        engine_operator=each,
        step=step_fixed,
        schedule=_schedule(clock),
    )


_COLUMNS = ("gap", "hook", "engine", "other", "linear", "tanh")


def _row(plain: dict[str, float], seen: Sample) -> tuple[float, ...]:
    whole = sum(seconds for (text, _), seconds in seen.forward.items() if not is_loss(text))
    hook = (sum(seen.backward.values()) + seen.engine - plain["backward"]) / seen.nodes
    linear, tanh = (
        sum(seconds for (text, _), seconds in seen.forward.items() if text.startswith(kind)) / _LINKS
        for kind in ("linear(", "tanh(")
    )
    return (plain["forward"] - whole) / (2 * _LINKS), hook, seen.engine, plain["other"], linear, tanh


def _schedule(clock: Clock) -> float:
    optimizer = make_optimizer([nn.Parameter(torch.zeros(4))], StepSettings())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    optimizer.step()
    return interleaved({"": lambda: timed(clock, scheduler.step)}, rounds=30)[""]


# -- process groups ----------------------------------------------------------------------------------------------

_MESSAGE_SIZES = (1 << 10, 1 << 13, 1 << 16, 1 << 18, 1 << 20, 1 << 21, 1 << 22, 1 << 24)  # bytes
_LONG, _TOO_LONG = 0.03, 0.5  # seconds
_ENOUGH = 1 << 20  # bytes
_LAYERS = 30
_MESSAGES = 4  # number of messages of 4 MB while contention is measured


def _device() -> torch.device:
    """The device of the group's tensors."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _now() -> float:
    """The time after all started work is done; on a GPU, calls return earlier."""
    if dist.get_backend() == "nccl":
        torch.cuda.synchronize()
    return time.perf_counter()


class Collectives:
    """Samples of all_reduce and broadcast for several sizes. Rounds can alternate with other measurements."""

    def __init__(self) -> None:
        self.taken: dict[tuple[str, int], list[float]] = {
            (operation, size): [] for operation in ("all_reduce", "broadcast") for size in _MESSAGE_SIZES
        }
        self.tensors = {size: torch.zeros(size // 4, device=_device()) for size in _MESSAGE_SIZES}
        self.times: dict[tuple[str, int], int] = {}
        """Consecutive runs of each: after a pause, the first run may be faster, because CPU quota was left over."""

    def round(self) -> None:
        """Run each collective for a short time, on all ranks together."""
        for (operation, size), taken in self.taken.items():
            times = self.times.get((operation, size), 1)
            if not times:
                continue
            dist.barrier()
            start = _now()
            for _ in range(times):
                _run_collective(operation, self.tensors[size])
            taken.append((_now() - start) / times)
            if (operation, size) not in self.times:
                slowest = torch.tensor(taken[-1], device=_device())
                dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
                seconds = float(slowest)
                # on a slow link, smaller messages are enough for a fit
                waste = seconds > _TOO_LONG and size > _ENOUGH
                self.times[(operation, size)] = 0 if waste else int(min(64.0, 1 + _LONG / seconds))

    def costs(self, *, warm: int = 2) -> list[CollectiveCost]:
        """Fit latency + bytes · per_byte; the result is the same on all ranks."""
        found = []
        for operation in ("all_reduce", "broadcast"):
            sizes = [size for size in _MESSAGE_SIZES if self.times[(operation, size)]]
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
        """Seconds as measured by the last rank to arrive, which doesn't wait."""
        taken = torch.tensor(self.taken[(operation, size)][warm:], device=_device())
        # the root of a broadcast only sends; the broadcast ends when all ranks have received it
        dist.all_reduce(taken, op=dist.ReduceOp.MIN if operation == "all_reduce" else dist.ReduceOp.MAX)
        return typical(taken.tolist())


def measure_collectives(*, rounds: int = 9) -> list[CollectiveCost]:
    """Measure all collectives of this process group."""
    samples = Collectives()
    with gc_disabled():
        for _ in range(rounds + 2):
            samples.round()
    return samples.costs()


def _run_collective(operation: str, tensor: Tensor) -> None:
    if operation == "all_reduce":
        dist.all_reduce(tensor)
    else:
        dist.broadcast(tensor, src=0)


def measure_contention(*, rounds: int = 9) -> dict[str, float]:
    """Measure how much computing and collectives slow each other down when they overlap."""
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
            while done is None:  # compute until all collectives are done
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
    """Measure what DDP adds to a forward pass and to each gradient, on a chain of tiny layers."""
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
    """The name of a fact about this group in a sample store; groups of other sizes have other names."""
    return f"{name} {dist.get_backend()} {dist.get_world_size()}"


def measure_group() -> dict[str, Any]:
    """Measure all facts about this process group."""
    collectives = measure_collectives()
    facts: dict[str, Any] = {group_fact("collectives"): [cost.model_dump() for cost in collectives]}
    if dist.get_backend() != "nccl":
        facts[group_fact("ddp")] = {**measure_ddp(collectives[0]), **measure_contention()}
    return facts


def group_lacks(facts: Mapping[str, Any]) -> bool:
    """Whether a rank lacks facts about this process group; the result is the same on all ranks."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
        return False
    lacks = torch.tensor(float(group_fact("collectives") not in facts), device=_device())
    dist.all_reduce(lacks, op=dist.ReduceOp.MAX)
    return bool(lacks)


def group_facts(facts: Mapping[str, Any]) -> tuple[list[Any], dict[str, float]]:
    """Return the collectives of all groups, and the DDP overhead of the largest group."""
    lists = [fact for name, fact in facts.items() if name.startswith("collectives ")]
    hosts = {int(name.split()[-1]): fact for name, fact in facts.items() if name.startswith("ddp ")}
    return [cost for found in lists for cost in found], hosts[max(hosts)] if hosts else {}
