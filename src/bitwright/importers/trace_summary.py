"""Summarize a trace without its model: steps, the time of kernels, collectives, and a replay of the steady step.

In the replay, the host issues work, streams run it, and the host waits where it waited. From the mean durations of
kernels and of the host's work between launches, it computes how long a steady step takes, whether the host or the
device limits the step, and what faster kernels would change.
"""

from __future__ import annotations

import re
import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from bitwright.importers.trace_events import Event, GpuKernel, HostCall, Trace, Window, read_trace, training_steps
from bitwright.profiling.step_timer import middle_half

__all__ = ["TraceReplay", "TraceSummary", "TracedStepTime", "replay_steps", "summarize_trace"]

_STEADY = 0.05  # steps that differ more than this from the median are warm-up, or cut off
_NAMES = (
    ("AllReduce", "all_reduce"),
    ("AllGather", "all_gather"),
    ("ReduceScatter", "reduce_scatter"),
    ("Broadcast", "broadcast"),
    ("SendRecv", "all_to_all"),
    ("Reduce", "reduce"),
)
_WAITS = re.compile(r"Synchronize$|^(cuda|hip)Memcpy$|WithStream$|^cuda(Free|Malloc)$|^hip(Free|Malloc)$")
_COPY = re.compile(r"Mem(cpy|set)")
_LONG = 50.0  # a launch or copy that takes so many microseconds waits for the device or for its queue
_CALL = 5.0  # microseconds of a call that waits, besides waiting
_TOUCH = 20.0  # a kernel that begins within so many microseconds after another one's end may wait for it
_STEPS, _SETTLED = 8, 3  # replayed steps, and those at the start that fill the queue
Bound = Literal["device", "host"]


@dataclass(frozen=True, kw_only=True)
class TracedStepTime:
    """One step of a trace, in seconds."""

    name: str
    seconds: float
    compute: float
    """The time during which at least one kernel computes; 0 in a trace without kernels."""
    collective: float
    """The total time of the kernels of collectives, including their waiting time."""
    copy: float
    steady: bool
    """Whether the step is neither warm-up nor cut off."""


@dataclass(frozen=True, kw_only=True)
class TraceSummary:
    """What a trace contains."""

    device: str
    on_gpu: bool
    operators: int
    """Operators that were not called by another operator."""
    has_shapes: bool
    has_backward: bool
    steps: tuple[TracedStepTime, ...]
    collectives: dict[str, int] = field(default_factory=dict)
    """The number of kernels by collective."""
    replay: TraceReplay | None = None
    """The steady step, replayed from the mean durations of kernels and of the host's work."""

    @property
    def error(self) -> float | None:
        """The replayed step relative to the traced one, minus 1."""
        measured = self.step_seconds
        return self.replay.seconds / measured - 1 if self.replay is not None and measured else None

    @property
    def steady(self) -> tuple[TracedStepTime, ...]:
        """The steps that are neither warm-up nor cut off."""
        return tuple(step for step in self.steps if step.steady)

    @property
    def step_seconds(self) -> float | None:
        """The median of the steady steps."""
        return statistics.median(step.seconds for step in self.steady) if self.steady else None

    def __str__(self) -> str:
        parts = [f"{self.device}: {self.operators} operators {'with' if self.has_shapes else 'without'} shapes"]
        if self.step_seconds is not None:
            compute = statistics.median(step.compute for step in self.steady)
            text = f"{len(self.steady)} of {len(self.steps)} steps are steady, {1e3 * self.step_seconds:.1f} ms each"
            parts.append(text + (f" ({1e3 * compute:.1f} ms of kernels)" if self.on_gpu else ""))
        if self.replay is not None:
            limit = "the host limits it" if self.replay.bound == "host" else "the device limits it"
            parts.append(f"replayed {1e3 * self.replay.seconds:.1f} ms ({100 * (self.error or 0):+.1f} %), {limit}")
        elif self.step_seconds is None:
            parts.append("no complete training step")
        if not self.has_backward:
            parts.append("no backward pass")
        if self.collectives:
            parts.append("collectives: " + ", ".join(f"{n} {name}" for name, n in sorted(self.collectives.items())))
        return "; ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """The fields, and the time of a steady step."""
        return {**asdict(self), "step_seconds": self.step_seconds, "error": self.error}


def summarize_trace(path: str | Path) -> TraceSummary:
    """Read a trace, count what is in it, and replay its steady step. A trace without operators is an error."""
    file = Path(path)
    trace = read_trace(file)
    steps = traced_steps(trace)
    collectives: dict[str, int] = defaultdict(int)
    for kernel in trace.kernels:
        if kernel.kind == "collective":
            collectives[_collective(kernel.name)] += 1
    return TraceSummary(
        device=trace.device or ("a GPU" if trace.on_gpu else "a CPU"),
        on_gpu=trace.on_gpu,
        operators=len(trace.tops),
        has_shapes=any(event.inputs is not None for event in trace.tops),
        has_backward=any(event.is_backward for event in trace.tops),
        steps=tuple(step for step, _ in steps),
        collectives=dict(collectives),
        replay=replay_steps(trace, steady_windows(steps)),
    )


def steady_windows(steps: Iterable[tuple[TracedStepTime, Window]]) -> list[Window]:
    """The windows of the steady steps."""
    return [window for step, window in steps if step.steady]


def _collective(name: str) -> str:
    return next((ours for theirs, ours in _NAMES if re.search(theirs, name, re.IGNORECASE)), "other")


def traced_steps(trace: Trace) -> list[tuple[TracedStepTime, Window]]:
    """Steps as the profiler's schedule marked them, or from one forward to the next."""
    windows = [window for window in trace.windows or _forward_windows(trace) if _has_work(window, trace.tops)]
    if not windows:
        return []
    median = statistics.median(window.end - window.start for window in windows)
    nearest = min(abs(window.end - window.start - median) for window in windows)
    limit = max(_STEADY * median, nearest)
    return [
        (_step(window, trace.kernels, abs(window.end - window.start - median) <= limit), window) for window in windows
    ]


def _forward_windows(trace: Trace) -> list[Window]:
    starts = [step.forward[0].start for step in training_steps(trace.tops) if step.forward and step.backward]
    return [Window(name=f"step {number}", start=a, end=b) for number, (a, b) in enumerate(pairwise(starts))]


def _has_work(window: Window, tops: Iterable[Event]) -> bool:
    return any(window.start <= event.start < window.end for event in tops)


def _step(window: Window, kernels: Iterable[GpuKernel], steady: bool) -> TracedStepTime:
    own = [k for k in kernels if k.launched is not None and window.start <= k.launched < window.end]
    spans = {kind: [(k.start, k.end) for k in own if k.kind == kind] for kind in ("compute", "collective", "copy")}
    return TracedStepTime(
        name=window.name,
        seconds=1e-6 * (window.end - window.start),
        compute=1e-6 * _union(spans["compute"]),
        collective=1e-6 * sum(end - start for start, end in spans["collective"]),
        copy=1e-6 * sum(end - start for start, end in spans["copy"]),
        steady=steady,
    )


def _union(spans: list[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


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
