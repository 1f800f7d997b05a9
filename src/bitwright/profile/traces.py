"""Reading a `torch.profiler` Chrome trace: operators with their kernels' time, and training steps cut out of them."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bitwright.errors import BitwrightError

_ENGINE = "autograd::engine::evaluate_function: "
_TYPES = {"float": "float32", "double": "float64", "c10::BFloat16": "bfloat16", "c10::Half": "float16"}
Shape = tuple[int, ...]


@dataclass
class Event:
    """One operator that ran, or one launch of a kernel."""

    name: str
    start: float
    end: float
    thread: Any
    inputs: list[tuple[Shape, str | None]] | None = None
    """Shape and dtype (where the trace says it) of each; None without record_shapes."""
    sequence: int | None = None
    """Autograd's counter when it began: forward's say which node would be made next, backward's which one runs."""
    correlation: int | None = None
    device: float | None = None
    """Microseconds of the kernels that were launched within it; None in a trace without kernels."""
    children: list[Event] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Of its kernels if the trace has kernels: a GPU doesn't wait for an operator that launches none."""
        return 1e-6 * (self.end - self.start if self.device is None else self.device)

    @property
    def is_backward(self) -> bool:
        """Whether autograd's engine ran it."""
        return self.name.startswith(_ENGINE)

    @property
    def gradient(self) -> Shape | None:
        """The shape of the gradient that a parameter takes here."""
        if not self.name.endswith("AccumulateGrad"):
            return None
        return next((child.inputs[0][0] for child in self.children if child.inputs), None)


@dataclass
class Trace:
    """What is in the file."""

    tops: list[Event]
    """Operators that no other operator has called, in order."""
    annotated: dict[str, dict[str, list[float]]]
    """Seconds by category and name."""
    device: str | None
    on_gpu: bool


@dataclass
class TracedStep:
    """One forward with its backward."""

    forward: list[Event] = field(default_factory=list)
    backward: list[Event] = field(default_factory=list)


def read_trace(path: Path) -> Trace:
    """Read the file; kernels' time is given to the operators that launched them."""
    data = _json(path)
    events: list[Event] = []
    kernels: dict[int, float] = defaultdict(float)
    annotated: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for event in data["traceEvents"]:
        if event.get("ph") != "X":
            continue
        args = event.get("args") or {}
        category = event.get("cat", "")
        if category == "kernel" or category.startswith("gpu_mem"):
            kernels[args.get("correlation", -1)] += float(event["dur"])
        elif category.endswith("user_annotation"):
            annotated[category][str(event["name"])].append(1e-6 * float(event["dur"]))
        elif category in ("cpu_op", "cuda_runtime", "cuda_driver"):
            events.append(_event(event, args, launches=category != "cpu_op"))
    devices = data.get("deviceProperties") or [{}]
    return Trace(_tops(events, kernels), annotated, devices[0].get("name"), bool(kernels))


def _json(path: Path) -> dict[str, Any]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise BitwrightError(
            f"can't read the trace: {error.strerror}", where=str(path), fix="use prof.export_chrome_trace(path)"
        ) from None
    try:
        data = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
        data = {"traceEvents": data} if isinstance(data, list) else data
        wrong = None if all(isinstance(event, dict) for event in data["traceEvents"]) else "events that are no objects"
    except (ValueError, KeyError, TypeError, OSError, EOFError) as error:
        wrong = type(error).__name__
    if wrong is not None:
        raise BitwrightError(
            "not a Chrome trace", where=str(path), value=wrong, fix="use prof.export_chrome_trace(path)"
        )
    return data  # type: ignore[no-any-return]


def _event(event: dict[str, Any], args: dict[str, Any], *, launches: bool) -> Event:
    start = float(event["ts"])
    return Event(
        name=str(event["name"]).removeprefix("aten::"),
        start=start,
        end=start + float(event.get("dur", 0)),
        thread=event.get("tid"),
        inputs=_inputs(args),
        sequence=args.get("Sequence number"),
        correlation=args.get("correlation") if launches else None,
    )


def _inputs(args: dict[str, Any]) -> list[tuple[Shape, str | None]] | None:
    shapes = args.get("Input Dims")
    if shapes is None:
        return None
    types = args.get("Input type") or [None] * len(shapes)
    found: list[tuple[Shape, str | None]] = []
    for shape, type in zip(shapes, types, strict=False):
        if shape and isinstance(shape[0], list):  # a list of tensors, as `cat` has it
            found += [(tuple(one), None) for one in shape]
        else:
            found.append((tuple(shape), _TYPES.get(str(type))))
    return found


def _tops(events: list[Event], kernels: dict[int, float]) -> list[Event]:
    """Operators that no other one has called; those that are under way when a kernel is launched get its time."""
    found: list[Event] = []
    open_: dict[Any, list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda event: (event.start, -event.end)):
        stack = open_[event.thread]
        while stack and stack[-1].end <= event.start:
            stack.pop()
        if event.correlation is not None:
            for around in stack:
                around.device = (around.device or 0.0) + kernels.get(event.correlation, 0.0)
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
    """Forwards with their backwards, in order.

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
