"""Read a Chrome trace of `torch.profiler`: operators with the time of their kernels, grouped into training steps.

Traces of torch 1.8 and later are read, of CPUs and of NVIDIA and AMD GPUs. The names of categories changed in torch
1.11; ROCm writes CUDA's.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bitwright.core.documents import gunzip, parse_json, read_bytes
from bitwright.core.errors import BitwrightError

_ENGINE = "autograd::engine::evaluate_function: "
_TYPES = {"float": "float32", "double": "float64", "c10::BFloat16": "bfloat16", "c10::Half": "float16"}
Shape = tuple[int, ...]
Work = Literal["compute", "collective", "copy"]
_FIX = "use prof.export_chrome_trace(path)"
_CATEGORIES = {  # of torch before 1.11, and of other builds
    "Operator": "cpu_op",
    "Runtime": "cuda_runtime",
    "Kernel": "kernel",
    "Memcpy": "gpu_memcpy",
    "Memset": "gpu_memset",
    "hip_runtime": "cuda_runtime",
    "hip_driver": "cuda_driver",
}
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_ANNOTATION = re.compile(r"ProfilerStep#\d+$|Optimizer\.\w+#|enumerate\(DataLoader\)#|(nccl|rccl|gloo):|## ")
_STEP = re.compile(r"ProfilerStep#\d+$")
_OPTIMIZER = re.compile(r"Optimizer\.(step|zero_grad)#")
_COLLECTIVE = re.compile(r"nccl|rccl|msccl|oneccl", re.IGNORECASE)
_LONGEST = 1e18  # microseconds since 1970 or since the start of the machine
_MOST_BYTES = 2 << 30


@dataclass
class Event:
    """One operator, or one launch of a kernel."""

    name: str
    start: float
    end: float
    thread: Any
    inputs: list[tuple[Shape, str | None]] | None = None
    """The shape of each, and its dtype if the trace has it; None without record_shapes."""
    sequence: int | None = None
    """Autograd's counter at the start: the next node to create in forward, the node that runs in backward."""
    forward_thread: int | None = None
    """In backward, the number of the thread that ran forward; 0 or None in forward."""
    correlation: int | None = None
    device: float | None = None
    """Microseconds of the kernels that were launched within it; None in a trace without kernels."""
    is_call: bool = False
    """Whether it is a call of the GPU's library, not an operator."""
    kernels: list[int] = field(default_factory=list)
    """The numbers of the launches within it."""
    children: list[Event] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The time of its kernels if the trace has kernels, otherwise its own time."""
        return 1e-6 * (self.end - self.start if self.device is None else self.device)

    @property
    def is_backward(self) -> bool:
        """Whether it belongs to the backward pass. Before torch 1.11, the engine's own events are missing."""
        if self.name.startswith(_ENGINE) or self.name.endswith("AccumulateGrad"):
            return True
        return self.sequence is not None and bool(self.forward_thread)

    @property
    def gradient(self) -> Shape | None:
        """The shape of the gradient that is accumulated here."""
        if not self.name.endswith("AccumulateGrad"):
            return None
        return next((event.inputs[0][0] for event in (self, *self.children) if event.inputs), None)


@dataclass(frozen=True, kw_only=True)
class GpuKernel:
    """A kernel or another activity of a GPU. Times are in microseconds."""

    name: str
    kind: Work
    start: float
    end: float
    launched: float | None
    """When the host launched it; None if the trace doesn't say."""
    stream: Any = None
    correlation: int | None = None
    """The number of the call that launched it."""


@dataclass(frozen=True, kw_only=True)
class HostCall:
    """A call of the GPU's library: a launch, a copy or a wait. Times are microseconds."""

    name: str
    start: float
    end: float
    thread: Any
    correlation: int | None


@dataclass(frozen=True, kw_only=True)
class Window:
    """A step marked by the schedule of the profiler. Times are in microseconds."""

    name: str
    start: float
    end: float


@dataclass
class Trace:
    """The content of a trace file."""

    tops: list[Event]
    """Operators that were not called by another operator, in order."""
    annotated: dict[str, dict[str, list[float]]]
    """Seconds by category and name."""
    device: str | None
    on_gpu: bool
    kernels: list[GpuKernel] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    calls: list[HostCall] = field(default_factory=list)
    optimizing: list[Window] = field(default_factory=list)
    """The optimizer's steps on the host, and its calls of `zero_grad`."""


@dataclass
class TracedStep:
    """One forward with its backward."""

    forward: list[Event] = field(default_factory=list)
    backward: list[Event] = field(default_factory=list)


@dataclass
class _Raw:
    """Events by type."""

    events: list[Event] = field(default_factory=list)
    kernels: list[tuple[str, Work, float, float, int | None, Any]] = field(default_factory=list)
    annotated: dict[str, dict[str, list[float]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    windows: list[Window] = field(default_factory=list)
    optimizing: list[Window] = field(default_factory=list)
    categories: Counter[str] = field(default_factory=Counter)

    def add(self, event: dict[str, Any]) -> None:
        args = event.get("args") or {}
        category = str(event.get("cat", ""))
        category = _CATEGORIES.get(category, category)
        name = str(event.get("name", ""))
        self.categories[category] += 1
        if category == "kernel" or category.startswith("gpu_mem"):
            start = _time(event, "ts") if "ts" in event else 0.0
            kind: Work = "copy" if category != "kernel" else "collective" if _COLLECTIVE.search(name) else "compute"
            end, stream = start + _time(event, "dur"), args.get("stream", event.get("tid"))
            stream = stream if isinstance(stream, int | str) else None
            self.kernels.append((name, kind, start, end, _number(args, "correlation"), stream))
        elif category.endswith("user_annotation") or (category == "cpu_op" and _ANNOTATION.match(name)):
            category = category if category.endswith("user_annotation") else "user_annotation"
            self.annotated[category][str(event["name"])].append(1e-6 * _time(event, "dur"))
            if category == "user_annotation" and (_STEP.match(name) or _OPTIMIZER.match(name)):
                start = _time(event, "ts")
                found = self.windows if _STEP.match(name) else self.optimizing
                found.append(Window(name=name, start=start, end=start + _time(event, "dur")))
        elif category == "cpu_op" or category in _LAUNCHES:
            self.events.append(_event(event, args, launches=category != "cpu_op"))


def read_trace(path: Path) -> Trace:
    """Read a trace; the time of kernels is added to the operators that launched them.

    The kernels of collectives wait for other devices. Their time is no operator's; `Trace.kernels` has it.
    """
    data = _json(path)
    raw = _Raw()
    phases: Counter[str] = Counter()
    for number, event in enumerate(data["traceEvents"]):
        phases[str(event.get("ph"))] += 1
        if event.get("ph") != "X":
            continue
        try:
            raw.add(event)
        except (LookupError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise BitwrightError(
                f"an event of the trace can't be read: {type(error).__name__}: {error}",
                where=f"{path}, event {number}",
                value=event,
                fix=_FIX,
                code="invalid-value",
            ) from error
    launched: dict[int | None, float] = {
        event.correlation: event.start for event in raw.events if event.correlation is not None
    }
    if not any(not event.is_call for event in raw.events):
        raise _no_operators(raw, phases, path)
    _check_kernels(raw, path)
    kernels = [
        GpuKernel(
            name=name,
            kind=kind,
            start=start,
            end=end,
            launched=None if correlation is None else launched.get(correlation),
            stream=stream,
            correlation=correlation,
        )
        for name, kind, start, end, correlation, stream in raw.kernels
    ]
    calls = [
        HostCall(name=one.name, start=one.start, end=one.end, thread=one.thread, correlation=one.correlation)
        for one in raw.events
        if one.is_call
    ]
    seconds: dict[int, float] = defaultdict(float)
    for _, kind, start, end, correlation, _ in raw.kernels:
        if kind != "collective" and correlation is not None:
            seconds[correlation] += end - start
    tops = _tops(raw.events, seconds)
    windows = _flat(raw.windows)
    return Trace(tops, raw.annotated, _device(data), bool(kernels), kernels, windows, calls, raw.optimizing)


def _flat(windows: list[Window]) -> list[Window]:
    """Steps without others in them: of two nested ones the outer, of several in one the inner ones."""
    found: list[tuple[Window, list[Window]]] = []
    for window in sorted(windows, key=lambda window: (window.start, -window.end)):
        if found and window.end <= found[-1][0].end:
            found[-1][1].append(window)
        else:
            found.append((window, []))
    flat = [one for outer, inner in found for one in (_flat(inner) if len(inner) > 1 else [outer])]
    return sorted(flat, key=lambda window: window.start)


def _no_operators(raw: _Raw, phases: Counter[str], path: Path) -> BitwrightError:
    """Another tool's trace, or one without the host's operators."""
    known = ", ".join(name or "none" for name, _ in raw.categories.most_common(4))
    if known:
        value = f"events of the categories {known}"
    elif phases["B"] or phases["b"]:
        value = "events with separate beginnings and ends, as other tools write them"
    else:
        value = f"{sum(phases.values())} events without a duration"
    fix = "record with activities=[ProfilerActivity.CPU, …] and export with export_chrome_trace"
    what = "the trace has no operators of torch"
    return BitwrightError(what, where=str(path), value=value, fix=fix, code="no-operators")


def _check_kernels(raw: _Raw, path: Path) -> None:
    launches = sum(event.correlation is not None and "Launch" in event.name for event in raw.events)
    if launches and not raw.kernels:
        raise BitwrightError(
            "the trace launches kernels but has none, so the times of its operators are unknown",
            where=str(path),
            value=f"{launches} launches",
            fix="record with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]",
            code="no-kernels",
        )


def _device(data: dict[str, Any]) -> str | None:
    devices = data.get("deviceProperties")
    first = devices[0] if isinstance(devices, list) and devices else None
    name = first.get("name") if isinstance(first, dict) else None
    return name if isinstance(name, str) else None


def _time(event: dict[str, Any], key: str) -> float:
    """Microseconds."""
    value = float(event[key])
    if not -_LONGEST < value < _LONGEST or (key == "dur" and value < 0):
        raise ValueError(f"{key} is {value:g}")
    return value


def _json(path: Path) -> dict[str, Any]:
    raw = read_bytes(path, what="the trace", fix=_FIX, most=_MOST_BYTES)
    if raw[:2] == b"\x1f\x8b":
        raw = gunzip(raw, where=str(path), most=_MOST_BYTES, fix=_FIX)
    try:
        data = parse_json(raw, where=str(path), what="the trace", fix=_FIX, strict=False)
    except BitwrightError as error:
        first = error.problems[0]
        raise BitwrightError(
            "not a Chrome trace", where=first.where, value=first.what, fix=_FIX, code=first.code
        ) from error
    data = {"traceEvents": data} if isinstance(data, list) else data
    events = data.get("traceEvents") if isinstance(data, dict) else None
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        wrong = "there is no list of events" if not isinstance(events, list) else "an event that is not an object"
        raise BitwrightError("not a Chrome trace", where=str(path), value=wrong, fix=_FIX, code="invalid-value")
    return data


def _event(event: dict[str, Any], args: dict[str, Any], *, launches: bool) -> Event:
    start, thread = _time(event, "ts"), event.get("tid")
    if thread is not None and not isinstance(thread, int | str):
        raise TypeError("tid is neither a number nor a text")
    process = event.get("pid")
    if isinstance(process, int | str):  # ranks in one file
        thread = f"{process}/{thread}"
    return Event(
        name=str(event["name"]).removeprefix("aten::"),
        start=start,
        end=start + _time(event, "dur") if "dur" in event else start,
        thread=thread,
        inputs=_inputs(args),
        sequence=_number(args, "Sequence number"),
        forward_thread=_number(args, "Fwd thread id"),
        correlation=_number(args, "correlation") if launches else None,
        is_call=launches,
    )


def _number(args: dict[str, Any], key: str) -> int | None:
    return None if args.get(key) is None else int(args[key])


def _shape(value: Any) -> Shape:
    if not isinstance(value, list) or not all(isinstance(size, int) for size in value):
        raise TypeError("a shape is not a list of whole numbers")
    return tuple(value)


def _inputs(args: dict[str, Any]) -> list[tuple[Shape, str | None]] | None:
    shapes = args.get("Input Dims", args.get("Input dims"))
    if shapes is None:
        return None
    types = args.get("Input type") or [None] * len(shapes)
    found: list[tuple[Shape, str | None]] = []
    for shape, type in zip(shapes, types, strict=False):
        if shape and isinstance(shape[0], list):  # a list of tensors, as in `cat`
            found += [(_shape(one), None) for one in shape]
        else:
            found.append((_shape(shape), _TYPES.get(str(type))))
    return found


def _tops(events: list[Event], kernels: dict[int, float]) -> list[Event]:
    """Operators that no other operator called; a kernel's time is added to all operators that enclose its launch."""
    found: list[Event] = []
    open_: dict[Any, list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda event: (event.start, -event.end)):
        stack = open_[event.thread]
        while stack and stack[-1].end <= event.start:
            stack.pop()
        if event.is_call or event.correlation is not None:
            for around in stack if event.correlation is not None else ():
                around.device = (around.device or 0.0) + kernels.get(event.correlation or 0, 0.0)
                around.kernels.append(event.correlation or 0)
            continue
        if kernels:
            event.device = 0.0
        if stack:
            stack[-1].children.append(event)
        else:
            found.append(event)
        stack.append(event)
    return found


def training_steps(tops: Iterable[Event]) -> list[TracedStep]:
    """Forward passes with their backward passes, in order.

    Forward's operators are those of one thread that autograd has counted: what runs without gradients (optimizers,
    clipping, evaluation) isn't, and what other threads load isn't either.
    """
    tops = list(tops)
    threads = Counter(event.thread for event in tops if event.sequence is not None and not event.is_backward)
    if not threads:
        return []
    ((main, _),) = threads.most_common(1)
    steps = [TracedStep()]
    for event in tops:
        if event.is_backward:
            steps[-1].backward.append(event)
        elif event.sequence is not None and event.thread == main:
            if steps[-1].backward:
                steps.append(TracedStep())
            steps[-1].forward.append(event)
    return steps
