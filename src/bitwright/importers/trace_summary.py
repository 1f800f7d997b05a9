"""Summarize a trace without its model: steps, the time of kernels, collectives and what is missing."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from bitwright.importers.trace_events import Event, GpuKernel, Trace, Window, read_trace, training_steps
from bitwright.importers.trace_replay import TraceReplay, replay_steps

__all__ = ["TraceSummary", "TracedStepTime", "summarize_trace"]

_STEADY = 0.05  # steps that differ more than this from the median are warm-up, or cut off
_NAMES = (
    ("AllReduce", "all_reduce"),
    ("AllGather", "all_gather"),
    ("ReduceScatter", "reduce_scatter"),
    ("Broadcast", "broadcast"),
    ("SendRecv", "all_to_all"),
    ("Reduce", "reduce"),
)


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
