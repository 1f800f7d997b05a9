"""A `torch.profiler` Chrome trace of somebody's own run becomes a DeviceProfile: for devices that we can't run on.

torch writes the same events for CPUs and GPUs. Operators (`cpu_op`) carry their input shapes (`record_shapes=True`)
and a sequence number that backward's operators share with forward's. On a GPU the time is that of the kernels: each
was launched within an operator, and the launch and the kernel have one correlation number.
"""

from __future__ import annotations

import gzip
import json
import re
import statistics
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bitwright.errors import BitwrightError
from bitwright.profile.device import DeviceProfile, Host, OperatorCost, TensorsCost, Timing
from bitwright.profile.signature import TensorSpec
from bitwright.profile.stepgraph import StepGraph, StepOp
from bitwright.profile.way import base_format

# What torch's dispatcher calls the operators that models call; others have the name of their kind.
_ATEN = {
    "matmul": ("matmul", "bmm", "mm"),
    "linear": ("linear", "addmm"),
    "cross_entropy": ("cross_entropy_loss",),
    "getitem": ("slice", "select", "index"),
    "contiguous": ("contiguous", "clone"),
    "max_pool2d": ("max_pool2d", "max_pool2d_with_indices"),
}


@dataclass
class _Event:
    name: str
    start: float
    end: float
    thread: Any
    shapes: Any = None
    sequence: int | None = None
    correlation: int | None = None
    device: float = 0.0
    """Microseconds of the kernels that were launched within it."""
    children: list[_Event] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return 1e-6 * (self.device if self.device > 0 else self.end - self.start)


def import_trace(path: Path, graph: StepGraph, *, device: str | None = None) -> DeviceProfile:
    """Match the trace's operators with the recorded step's, by kind, shapes and order; give their median times."""
    operators, kernels, annotated, named = _read(path)
    on_gpu = _charge(operators, kernels)
    tops = _tops(operators)
    backward = _backward_by_sequence(tops)
    samples: dict[str, list[tuple[float, float]]] = defaultdict(list)
    unmatched = []
    for op in graph.ops:
        found = [event for event in tops if _is(event, op)]
        if not found:
            unmatched.append(op.name)
            continue
        for event in found:
            samples[op.call.key()].append((event.seconds, backward.get(event.sequence or -1, 0.0)))
    matched = {op.call.key() for op in graph.ops} & samples.keys()
    if not matched:
        raise BitwrightError(
            "the trace has no operator of this model",
            where=str(path),
            value=f"{len(tops)} operators",
            fix="record training steps of the same model and batch with record_shapes=True",
        )
    loss = [event for event in tops if event.name in ("cross_entropy_loss", "nll_loss", "mse_loss")]
    costs = [_cost(text, rows) for text, rows in samples.items()]
    if loss:
        costs.append(_cost(graph.loss.key(), [(e.seconds, backward.get(e.sequence or -1, 0.0)) for e in loss]))
    # views cost next to nothing and have no event of their own where torch skips them
    known = {cost.operator for cost in costs}
    for text in [op.call.key() for op in graph.ops] + [graph.loss.key()]:
        if text not in known:
            costs.append(
                OperatorCost(operator=text, format=base_format(None), forward=Timing(seconds=0, repetitions=0))
            )
            known.add(text)
    return DeviceProfile(
        bitwright_profile=1,
        device=device or named or ("a GPU" if on_gpu else "a CPU"),
        source="imported",
        note=f"from {path.name}; {len(unmatched)} of {len(graph.ops)} operators weren't in it and count as free",
        operators=costs,
        tensors=_optimizers(annotated),
        host=Host(),
    )


def _cost(text: str, rows: list[tuple[float, float]]) -> OperatorCost:
    forward = statistics.median(forward for forward, _ in rows)
    backward = statistics.median(back for _, back in rows)
    return OperatorCost(
        operator=text,
        format=base_format(None),
        forward=Timing(seconds=forward, repetitions=len(rows)),
        backward=Timing(seconds=backward, repetitions=len(rows)) if backward else None,
    )


Annotations = dict[str, dict[str, list[float]]]


def _read(path: Path) -> tuple[list[_Event], dict[int, float], Annotations, str | None]:
    """Operators, the kernels' time by correlation number, and annotations by category and name."""
    raw = path.read_bytes()
    try:
        data = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
        events = data["traceEvents"] if isinstance(data, dict) else data
    except (ValueError, KeyError, OSError) as error:
        raise BitwrightError(
            "not a Chrome trace", where=str(path), value=type(error).__name__, fix="use prof.export_chrome_trace(path)"
        ) from None
    operators: list[_Event] = []
    kernels: dict[int, float] = defaultdict(float)
    annotated: Annotations = defaultdict(lambda: defaultdict(list))
    devices = data.get("deviceProperties") if isinstance(data, dict) else None
    for event in events:
        if event.get("ph") != "X":
            continue
        args = event.get("args") or {}
        category = event.get("cat", "")
        if category == "kernel" or category.startswith("gpu_mem"):
            kernels[args.get("correlation", -1)] += float(event["dur"])
        elif category.endswith("user_annotation"):
            annotated[category][str(event["name"])].append(1e-6 * float(event["dur"]))
        elif category in ("cpu_op", "cuda_runtime", "cuda_driver"):
            start = float(event["ts"])
            operators.append(
                _Event(
                    name=str(event["name"]).removeprefix("aten::"),
                    start=start,
                    end=start + float(event.get("dur", 0)),
                    thread=event.get("tid"),
                    shapes=args.get("Input Dims"),
                    sequence=args.get("Sequence number"),
                    correlation=args.get("correlation") if category != "cpu_op" else None,
                )
            )
    return operators, kernels, annotated, devices[0].get("name") if devices else None


def _charge(events: list[_Event], kernels: dict[int, float]) -> bool:
    """Give each operator its kernels' time; says whether there are kernels."""
    if not kernels:
        return False
    by_thread: dict[Any, list[_Event]] = defaultdict(list)
    for event in events:
        if event.correlation is None:
            by_thread[event.thread].append(event)
    starts = {}
    for thread, found in by_thread.items():
        found.sort(key=lambda event: (event.start, -event.end))
        starts[thread] = [event.start for event in found]
    for launch in events:
        if launch.correlation is None or launch.correlation not in kernels:
            continue
        around = by_thread.get(launch.thread, [])
        index = bisect_right(starts.get(launch.thread, []), launch.start) - 1
        while index >= 0:
            if around[index].end >= launch.end:
                around[index].device += kernels[launch.correlation]
            index -= 1
            if index >= 0 and around[index].end < launch.start and around[index].start < launch.start - 1e7:
                break
    return True


def _tops(events: list[_Event]) -> list[_Event]:
    """Operators that no other operator has called, in order."""
    found: list[_Event] = []
    by_thread: dict[Any, float] = {}
    for event in sorted((e for e in events if e.correlation is None), key=lambda e: (e.start, -e.end)):
        if event.start >= by_thread.get(event.thread, -1.0):
            by_thread[event.thread] = event.end
            found.append(event)
    return found


def _backward_by_sequence(tops: list[_Event]) -> dict[int, float]:
    """Seconds of backward's operators by the sequence number of forward's."""
    found: dict[int, float] = defaultdict(float)
    for event in tops:
        if event.name.startswith("autograd::engine::evaluate_function: ") and event.sequence is not None:
            found[event.sequence] += event.seconds
    return found


def _is(event: _Event, op: StepOp) -> bool:
    names = _ATEN.get(op.call.kind, (op.call.kind,))
    if event.name not in names and event.name.removesuffix("_") not in names:
        return False
    return _fits(event.shapes, [spec for _, spec in op.call.ports])


def _fits(shapes: Any, ports: list[TensorSpec]) -> bool:
    """Whether the shapes of the ports come in this order among those of the event."""
    if shapes is None:
        return False
    waiting = [list(spec.shape) for spec in ports]
    for shape in shapes:
        if waiting and shape == waiting[0]:
            waiting.pop(0)
    return not waiting


def _optimizers(annotated: Annotations) -> list[TensorsCost]:
    """Steps of optimizers, whole: torch annotates them in every trace; on a GPU with the time of their kernels."""
    found: dict[str, float] = {}
    for name, times in {**annotated["user_annotation"], **annotated["gpu_user_annotation"]}.items():
        words = re.fullmatch(r"Optimizer\.(step|zero_grad)#(\w+)\.\w+", name)
        if words is not None:
            keys = (
                ["zero_grad"] if words[1] == "zero_grad" else [f"{words[2].lower()}/{w}" for w in ("loop", "foreach")]
            )
            found.update(dict.fromkeys(keys, statistics.median(times)))
    return [TensorsCost(name=key, per_element=0.0, per_tensor=0.0, fixed=seconds) for key, seconds in found.items()]
