"""Replay the steps of a trace: the host issues work, streams run it, and the host waits where it waited.

The replay needs no model. From the mean durations of kernels and of the host's work between launches, it computes how
long a steady step takes, whether the host or the device limits the step, and what faster kernels would change.
"""

from __future__ import annotations

import re
import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bitwright.importers.trace_events import GpuKernel, HostCall, Trace, Window
from bitwright.profiling.timing import middle_half

__all__ = ["TraceReplay", "replay_steps"]

_WAITS = re.compile(r"Synchronize$|^(cuda|hip)Memcpy$|WithStream$|^cuda(Free|Malloc)$|^hip(Free|Malloc)$")
_COPY = re.compile(r"Mem(cpy|set)")
_LONG = 50.0  # a launch or copy that takes so many microseconds waits for the device or for its queue
_CALL = 5.0  # microseconds of a call that waits, besides waiting
_TOUCH = 20.0  # a kernel that begins within so many microseconds after another one's end may wait for it
_STEPS, _SETTLED = 8, 3  # replayed steps, and those at the start that fill the queue
Bound = Literal["device", "host"]


@dataclass(frozen=True, kw_only=True)
class TraceReplay:
    """The replay of a steady step, in seconds."""

    seconds: float
    host: float
    """With kernels that take no time: the step is never shorter, however fast the device is."""
    without_collectives: float
    """With collectives that take no time."""
    bound: Bound
    """What limits the step: the host if kernels of half the time shorten it by less than a quarter of their share."""


@dataclass
class _Action:
    """A call of the host that launches work, waits, or both. Times are microseconds."""

    key: tuple[Any, ...]
    before: float
    """The host's own work since the call before."""
    spent: float
    """Its work within the call, without waiting."""
    kernels: list[_Work]
    waits: bool


@dataclass
class _Work:
    key: tuple[Any, ...]
    stream: Any
    seconds: float
    lag: float
    """From the time when it could begin to its beginning."""
    collective: bool
    after: tuple[Any, ...] | None = None
    """The kernel of another stream that it waited for."""


def replay_steps(trace: Trace, windows: Sequence[Window]) -> TraceReplay | None:
    """Replay the mean of these steps until they repeat. None without a step.

    On a CPU, and in windows without a launch, the step is the host's work.
    """
    if not windows:
        return None
    if not trace.on_gpu:
        seconds = 1e-6 * statistics.fmean(_middle([window.end - window.start for window in windows]))
        return TraceReplay(seconds=seconds, host=seconds, without_collectives=seconds, bound="host")
    steps = [_actions(trace, window) for window in windows]
    usual = statistics.median_low(len(actions) for actions, _ in steps)
    shape, rest = next(step for step in steps if len(step[0]) == usual)
    costs, hosts = _means(steps)
    rest = statistics.fmean(tail for _, tail in steps)

    def period(kernels: float = 1.0, collectives: float = 1.0) -> float:
        return 1e-6 * _period(shape, rest, costs, hosts, kernels, collectives)

    seconds, host, half = period(), period(0.0, 0.0), period(0.5, 0.5)
    spent = 1e-6 * sum(costs[work.key][0] for action in shape for work in action.kernels)
    bound: Bound = "host" if seconds - half < 0.25 * 0.5 * min(spent, seconds) else "device"
    return TraceReplay(seconds=seconds, host=host, without_collectives=period(1.0, 0.0), bound=bound)


def _middle(values: Sequence[float]) -> Sequence[float]:
    return middle_half(list(values), key=lambda value: value)


def _actions(trace: Trace, window: Window) -> tuple[list[_Action], float]:
    """The launches and waits of a step in order, and the host's work after the last one."""
    launched: dict[int | None, list[GpuKernel]] = defaultdict(list)
    for kernel in trace.kernels:
        if kernel.correlation is not None:
            launched[kernel.correlation].append(kernel)
    launching = {call.thread for call in trace.calls if call.correlation in launched}
    calls = sorted(
        (
            call
            for call in trace.calls
            if window.start <= call.start < window.end
            and call.thread in launching
            and (call.correlation in launched or _WAITS.search(call.name))
        ),
        key=lambda call: call.start,
    )
    usual = _usual(calls)
    streams = _Streams(trace.kernels)
    seen: dict[Any, int] = defaultdict(int)
    keys: dict[int, tuple[Any, ...]] = {}
    actions: list[_Action] = []
    reached = window.start
    for call in calls:
        own = launched.get(call.correlation, [])
        taken = call.end - call.start
        # a copy that is done when its call returns; a full queue also makes calls long
        waits = bool(_WAITS.search(call.name)) or any(kernel.end <= call.end for kernel in own)
        spent = taken
        if (waits or taken > _LONG) and streams.busy(call):
            spent = min(taken, _CALL if waits else usual[call.name])
        works = []
        for kernel in own:
            number = seen[kernel.name]
            seen[kernel.name] += 1
            key = keys[id(kernel)] = (kernel.name, number)
            lag, after = streams.reason(kernel, call)
            collective = kernel.kind == "collective"
            works.append(_Work(key, kernel.stream, kernel.end - kernel.start, lag, collective, keys.get(id(after))))
        name = (call.name, own[0].name if own else "")
        number = seen[name]
        seen[name] += 1
        actions.append(_Action((*name, number), max(0.0, call.start - reached), spent, works, waits))
        reached = max(reached, call.end)
    return actions, max(0.0, window.end - reached)


def _usual(calls: Iterable[HostCall]) -> Mapping[str, float]:
    """The lower quartile of each call's duration: what it takes without waiting."""
    taken: dict[str, list[float]] = defaultdict(list)
    for call in calls:
        taken[call.name].append(call.end - call.start)
    return {name: sorted(values)[len(values) // 4] for name, values in taken.items()}


class _Streams:
    """What runs before and beside a kernel."""

    def __init__(self, kernels: Iterable[GpuKernel]) -> None:
        self.by_end = sorted(kernels, key=lambda kernel: kernel.end)
        self.ends = [kernel.end for kernel in self.by_end]
        self.before: dict[int, float] = {}
        last: dict[Any, float] = {}
        for kernel in sorted(self.by_end, key=lambda kernel: kernel.start):
            self.before[id(kernel)] = last.get(kernel.stream, float("-inf"))
            last[kernel.stream] = max(kernel.end, last.get(kernel.stream, float("-inf")))

    def busy(self, call: HostCall) -> bool:
        """Whether the device had work for at least half of a call."""
        index = bisect_left(self.ends, (call.start + call.end) / 2)
        return index < len(self.by_end) and any(one.start < call.end for one in self.by_end[index : index + 8])

    def reason(self, kernel: GpuKernel, call: HostCall) -> tuple[float, GpuKernel | None]:
        """Why a kernel began when it did: microseconds after its launch or its stream, or after another kernel."""
        lag = kernel.start - max(call.start, self.before[id(kernel)])
        if lag <= _TOUCH:
            return max(0.0, lag), None
        index = bisect_left(self.ends, kernel.start + 0.5) - 1
        while index >= 0 and self.ends[index] > kernel.start - _TOUCH:
            other = self.by_end[index]
            if other.stream != kernel.stream:
                return max(0.0, kernel.start - other.end), other
            index -= 1
        return lag, None


def _means(
    steps: Iterable[tuple[list[_Action], float]],
) -> tuple[dict[Any, tuple[float, float]], dict[Any, tuple[float, float]]]:
    """Means over the steps: duration and lag of each kernel, and the host's work before and in each call."""
    works: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    hosts: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for actions, _ in steps:
        for action in actions:
            hosts[action.key].append((action.before, action.spent))
            for work in action.kernels:
                works[work.key].append((work.seconds, work.lag))
    costs = {key: (_mean(rows, 0), statistics.median(row[1] for row in rows)) for key, rows in works.items()}
    return costs, {key: (_mean(rows, 0), _mean(rows, 1)) for key, rows in hosts.items()}


def _mean(rows: Sequence[tuple[float, float]], column: int) -> float:
    return statistics.fmean(row[column] for row in rows)


def _period(
    actions: list[_Action],
    rest: float,
    costs: Mapping[Any, tuple[float, float]],
    hosts: Mapping[Any, tuple[float, float]],
    kernels: float,
    collectives: float,
) -> float:
    """Microseconds from one step to the next."""
    host, device = 0.0, 0.0
    free: dict[Any, float] = defaultdict(float)
    finished: list[float] = []
    for _ in range(_STEPS):
        ended: dict[Any, float] = {}
        for action in actions:
            before, spent = hosts[action.key]
            issued = host + before
            host = issued + spent
            last = 0.0
            for work in action.kernels:
                taken, lag = costs[work.key]
                factor = collectives if work.collective else kernels
                begin = max(issued, free[work.stream])
                if work.after is not None:
                    begin = max(begin, ended.get(work.after, 0.0))
                last = begin + (lag if factor else 0.0) + factor * taken
                free[work.stream] = ended[work.key] = last
                device = max(device, last)
            if action.waits:
                host = max(host, last if action.kernels else device)
        host += rest
        finished.append(max(host, device))
    return (finished[-1] - finished[_SETTLED]) / (_STEPS - 1 - _SETTLED)
