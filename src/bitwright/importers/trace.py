"""Import a Chrome trace of `torch.profiler` as a DeviceProfile, for devices that are not available here.

torch writes the same events for CPUs and GPUs. Operators carry their input shapes (`record_shapes=True`). Autograd
counts the nodes that it makes: an operator says where the counter stood when it began (a linear layer makes two or four
nodes), and backward's events say which node runs. So a node is the last operator's that began at or before its number.
"""

from __future__ import annotations

import re
import statistics
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, cast

from bitwright.cluster import predict_step
from bitwright.core.errors import BitwrightError
from bitwright.core.formatting import counted
from bitwright.importers.trace_events import Event, Shape, Trace, TracedStep, read_trace, training_steps
from bitwright.importers.trace_summary import TraceReplay, replay_steps, steady_windows, traced_steps
from bitwright.plan import Plan
from bitwright.profiling.cost_key import CallSpec
from bitwright.profiling.device_profile import DeviceProfile, Host, OperatorCost, OperatorTime, TensorsCost
from bitwright.profiling.execution import base_format
from bitwright.profiling.step_graph import StepGraph
from bitwright.profiling.step_timer import ACCUMULATE, Key, middle_half
from bitwright.training.config import AMP_DTYPES, Amp, StepSettings

__all__ = ["TraceMatch", "Unmatched", "import_trace", "match_trace"]

_OPTIMIZERS = {"adam": "adamw"}  # the same work
_WARM_UP = 1.25  # a leading step that takes so many times the median of the others is warm-up
# Names of operators in torch's dispatcher; all others have the name of their kind.
_ATEN = {
    "matmul": ("matmul", "bmm", "mm"),
    "linear": ("linear", "addmm"),
    "getitem": ("slice", "select", "index"),
    "contiguous": ("contiguous", "clone"),
    "max_pool2d": ("max_pool2d", "max_pool2d_with_indices"),
}


# Words in the names of kernels that run an operator of a kind.
_KERNEL = {
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), r"conv|gemm|winograd|cudnn|implicit|grad|fft|cutlass|miopen"),
    **dict.fromkeys(("linear", "matmul", "addmm"), r"gemm|gemv|cutlass|cublas|mm|Cijk|splitK|wmma|dot"),
    **dict.fromkeys(("batch_norm", "layer_norm", "group_norm"), r"bn|norm|welford|cudnn"),
    **dict.fromkeys(("relu", "gelu", "add", "mul", "sub", "div", "dropout"), r"elementwise|relu|clamp|add|mul|drop"),
    **dict.fromkeys(("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "mean", "sum"), r"pool|reduce"),
    **dict.fromkeys(("softmax", "log_softmax"), r"softmax"),
    "embedding": r"embedding|index|gather",
}


@dataclass(frozen=True, kw_only=True)
class Unmatched:
    """Events of one name that belong to no operator of the model, per step."""

    name: str
    seconds: float
    share: float
    """Of the step."""


@dataclass(frozen=True, kw_only=True)
class TraceMatch:
    """A trace that was matched with a recorded step."""

    profile: DeviceProfile
    steps: int
    """Steps whose operators were averaged; warm-up is skipped."""
    by_shapes: bool
    """Operators were matched by kind and shapes; else by kind, order and kernels."""
    matched: int
    operators: int
    confidence: float
    """1: every operator was found by its shapes. Without shapes, the share of operators with kernels of their kind."""
    measured: float | None
    """Seconds of a steady step, the median."""
    replay: TraceReplay | None
    unmatched: tuple[Unmatched, ...] = ()
    """Without the optimizer, largest first."""

    @property
    def unmatched_share(self) -> float:
        """Of the step."""
        return sum(one.share for one in self.unmatched)

    def __str__(self) -> str:
        how = "kind and shapes" if self.by_shapes else "kind, order and kernels, because the trace has no shapes"
        found = f"{self.matched} of {self.operators} operators were matched by {how}"
        parts = [f"{counted(self.steps, 'step')}", f"{found} (confidence {100 * self.confidence:.0f} %)"]
        if self.matched < self.operators:
            parts.append("the others count as free")
        if self.unmatched:
            worst = ", ".join(f"{one.name} {100 * one.share:.1f} %" for one in self.unmatched[:3])
            parts.append(f"{100 * self.unmatched_share:.1f} % of the step belongs to no operator of the model: {worst}")
        if self.measured is not None:
            parts.append(f"a steady step takes {1e3 * self.measured:.1f} ms")
        if self.replay is not None and self.profile.host.floor > 0:
            parts.append(f"the {self.replay.bound} limits it")
        return "; ".join(parts)


def import_trace(path: Path, graph: StepGraph, *, device: str | None = None) -> DeviceProfile:
    """Match the operators of the trace with those of the recorded step by kind, shapes and order, and average them."""
    return match_trace(path, graph, device=device).profile


def match_trace(path: Path, graph: StepGraph, *, device: str | None = None) -> TraceMatch:
    """Like `import_trace`, with how well the trace fits the step and what is left over."""
    trace = read_trace(path)
    steps = training_steps(trace.tops)
    names = {kernel.correlation: kernel.name for kernel in trace.kernels if kernel.correlation is not None}
    read = [_read(step, graph, names) for step in steps]
    most = max((len(step.matched) for step in read), default=0)
    if most and not any(step.backward for step in steps):
        raise BitwrightError(
            "the trace has no backward pass",
            where=str(path),
            value=f"{counted(len(trace.tops), 'operator')}",
            fix="record training steps: forward, backward and optimizer",
            code="no-backward",
        )
    if not most:
        raise BitwrightError(
            "the trace has no operator of this model",
            where=str(path),
            value=f"{counted(len(trace.tops), 'operator')}",
            fix="record training steps of the same model and batch with record_shapes=True",
            code="no-match",
        )
    whole = _without_warm_up([step for step in read if len(step.matched) == most])  # the trace may begin within a step
    costs = _costs(whole)
    formats = sorted({step.format for step in whole})
    # torch records no events for some views; they count as free.
    free = OperatorTime(seconds=0, repetitions=0)
    for call in [*(op.call for op in graph.ops), graph.loss]:
        for format in formats:
            for text in _texts(call, {}, format):
                costs.setdefault((text, format), OperatorCost(operator=text, format=format, forward=free))
    tensors = _optimizers(trace)
    profile = DeviceProfile(
        bitwright_profile=1,
        device=device or trace.device or ("a GPU" if trace.on_gpu else "a CPU"),
        source="imported",
        operators=list(costs.values()),
        tensors=tensors,
    )
    windows = traced_steps(trace)
    steady = steady_windows(windows)
    replay = replay_steps(trace, steady)
    profile = profile.model_copy(update={"host": _host(profile, graph, whole[0].format, replay, on_gpu=trace.on_gpu)})
    measured = statistics.median(1e-6 * (window.end - window.start) for window in steady) if steady else None
    match = TraceMatch(
        profile=profile,
        steps=len(whole),
        by_shapes=whole[0].by_shapes,
        matched=most,
        operators=len(graph.ops),
        confidence=statistics.fmean(step.confidence(graph) for step in whole),
        measured=measured,
        replay=replay,
        unmatched=_unmatched(trace, whole, measured),
    )
    note = [f"from {path.name}", str(match)]
    collectives = sum(kernel.kind == "collective" for kernel in trace.kernels)
    if collectives:
        note.append(f"{collectives} kernels of collectives are not part of it")
    if not any(name.startswith("Optimizer.step#") for name in trace.annotated["user_annotation"]):
        note.append("the optimizer's step is not marked in the trace; its time counts as fixed work of the step")
    return replace(match, profile=profile.model_copy(update={"note": "; ".join(note)}))


def _host(profile: DeviceProfile, graph: StepGraph, format: str, replay: TraceReplay | None, *, on_gpu: bool) -> Host:
    """What a step takes besides its operators, and the least that the host needs.

    Collectives are left out: a prediction for a cluster adds its own.
    """
    if replay is None:
        return Host()
    amp = next((name for name in AMP_DTYPES if base_format(cast(Amp, name)) == format), None)
    optimizer = "adamw" if "adamw/loop" in profile.by_name and "sgd/loop" not in profile.by_name else "sgd"
    settings = StepSettings(optimizer=cast(Any, optimizer), amp=cast(Amp | None, amp))
    try:
        own = predict_step(graph, Plan(), profile, settings=settings).seconds
    except BitwrightError:  # an optimizer that predictions don't know
        own = predict_step(graph, Plan(), _with_optimizer(profile), settings=settings).seconds
    return Host(step=max(0.0, replay.without_collectives - own), floor=replay.host if on_gpu else 0.0)


def _with_optimizer(profile: DeviceProfile) -> DeviceProfile:
    free = [TensorsCost(name=name, per_element=0, per_tensor=0) for name in ("sgd/loop", "sgd/foreach")]
    return profile.model_copy(update={"tensors": [*profile.tensors, *free]})


def _unmatched(trace: Trace, steps: list[_Read], measured: float | None) -> tuple[Unmatched, ...]:
    """Work per step that belongs to no operator: in backward, and everything outside of forward and backward."""
    seconds: dict[str, float] = defaultdict(float)
    for step in steps:
        for name, taken in step.unmatched.items():
            seconds[name] += taken / len(steps)
    counted = {id(event) for step in steps for event in step.events}
    passes = [(step.events[0].start, step.events[-1].end) for step in steps if step.events]
    first, last = min(start for start, _ in passes), max(end for _, end in passes)
    for event in trace.tops:
        optimizes = any(one.start <= event.start < one.end for one in trace.optimizing)
        if first <= event.start < last and id(event) not in counted and not optimizes:
            seconds[event.name] += event.seconds / len(steps)
    total = measured or sum(step.total for step in steps) / len(steps)
    rows = [Unmatched(name=name, seconds=taken, share=taken / total) for name, taken in seconds.items() if total]
    return tuple(sorted((row for row in rows if row.share > 1e-4), key=lambda row: -row.seconds))


def _without_warm_up(steps: list[_Read]) -> list[_Read]:
    """Without leading steps that take much longer than the others: they allocate memory and choose algorithms."""
    while len(steps) > 2 and steps[0].total > _WARM_UP * statistics.median(step.total for step in steps[1:]):
        steps = steps[1:]
    return steps


@dataclass
class _Read:
    """The times of one traced step, by the calls of the recorded step."""

    format: str
    matched: set[int] = field(default_factory=set)
    """Positions of operators that were found."""
    by_shapes: bool = True
    """Whether the trace has shapes. Else operators are matched by kind and order."""
    unmatched: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of events that belong to no operator, by name."""
    kernels: dict[int, list[str]] = field(default_factory=dict)
    """The names of each operator's kernels in forward, by position."""
    events: list[Event] = field(default_factory=list)
    keys: dict[int, list[Key]] = field(default_factory=dict)
    """Cost keys by position; the loss comes after the last operator. Several if the types are ambiguous."""
    forward: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    backward: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    gradients: dict[Key, list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def total(self) -> float:
        return sum(self.forward.values()) + sum(self.backward.values())

    def confidence(self, graph: StepGraph) -> float:
        """The share of operators that were found, and without shapes, whose kernels fit their kind."""
        if not graph.ops:
            return 1.0
        if self.by_shapes:
            return len(self.matched) / len(graph.ops)
        kinds = {position: graph.ops[position].call.kind for position in self.matched}
        return sum(_kernels_fit(kind, self.kernels.get(at, [])) for at, kind in kinds.items()) / len(graph.ops)


def _kernels_fit(kind: str, kernels: list[str]) -> float:
    """1 if a kernel has a name that fits, 0 if none has, and a half if nothing is known."""
    pattern = _KERNEL.get(kind)
    if not kernels or pattern is None:
        return 0.5
    return float(any(re.search(pattern, name, re.IGNORECASE) for name in kernels))


def _read(step: TracedStep, graph: StepGraph, kernels: Mapping[int, str]) -> _Read:
    """Assign each event to an operator, or to the operator before it; events after the last operator are the loss."""
    shaped = any(event.inputs for event in step.forward)
    found = _match(step.forward, graph) if shaped else _match_by_order(step.forward, graph)
    types = {position: _types(graph.ops[position].call, event) for position, event in found.items()}
    read = _Read(_format(types), set(found), shaped)
    at = {id(event): position for position, event in found.items()}
    read.kernels = {p: [kernels[k] for k in event.kernels if k in kernels] for p, event in found.items()}
    read.events = [*step.forward, *step.backward]
    last = max(found, default=-1)
    numbers: list[int] = []
    owners: list[int | None] = []
    owner: int | None = None
    for event in step.forward:
        position = at.get(id(event))
        if position is not None:
            owner = position
        elif owner == last or owner == len(graph.ops):
            owner = len(graph.ops)  # a loss can have any number of operators
        elif owner is not None and owner + 1 not in found:
            owner += 1  # the operator has another name in the dispatcher
        numbers.append(event.sequence or 0)
        owners.append(owner)
        if owner is not None:
            read.forward[owner] += event.seconds
        else:
            read.unmatched[event.name] += event.seconds
    for event in step.backward:
        shape = event.gradient
        if shape is not None:
            for text in {str(spec) for spec in graph.parameters.values() if spec.grad and spec.shape == shape}:
                read.gradients[(text, ACCUMULATE)].append(event.seconds)
        elif event.sequence is not None:
            index = bisect_right(numbers, event.sequence) - 1
            owner = owners[index] if index >= 0 else None
            if owner is not None:
                read.backward[owner] += event.seconds
            else:
                read.unmatched[event.name] += event.seconds
        else:
            read.unmatched[event.name] += event.seconds
    calls = [*(op.call for op in graph.ops), graph.loss]
    for position in read.forward:
        texts = _texts(calls[position], types.get(position, {}), read.format)
        read.keys[position] = [(text, read.format) for text in texts]
    return read


def _match(events: list[Event], graph: StepGraph) -> dict[int, Event]:
    """Events by the position of their operator: the k-th call with a kind and shapes has the k-th such event."""
    alike: dict[tuple[str, tuple[Shape, ...]], list[int]] = defaultdict(list)
    for position, op in enumerate(graph.ops):
        alike[(op.call.kind, tuple(sorted(spec.shape for _, spec in op.call.ports)))].append(position)
    found: dict[int, Event] = {}
    taken: set[int] = set()
    for (kind, shapes), positions in alike.items():
        names = _ATEN.get(kind, (kind,))
        fitting = [event for event in events if id(event) not in taken and _fits(event, names, shapes)]
        for position, event in zip(positions, fitting, strict=False):
            found[position] = event
            taken.add(id(event))
    return found


def _match_by_order(events: list[Event], graph: StepGraph) -> dict[int, Event]:
    """Events by the position of their operator, for a trace without shapes: the longest common sequence of kinds."""
    kinds = {name: kind for kind in {op.call.kind for op in graph.ops} for name in _ATEN.get(kind, (kind,))}
    known = [(kinds[name], event) for event in events if (name := event.name.removesuffix("_")) in kinds]
    ours = [op.call.kind for op in graph.ops]
    blocks = SequenceMatcher(None, ours, [kind for kind, _ in known], autojunk=False).get_matching_blocks()
    return {block.a + i: known[block.b + i][1] for block in blocks for i in range(block.size)}


def _fits(event: Event, names: tuple[str, ...], shapes: tuple[Shape, ...]) -> bool:
    """Whether the event has this name and all of these shapes; the order can differ from Python's (embedding)."""
    if event.inputs is None or (event.name not in names and event.name.removesuffix("_") not in names):
        return False
    return Counter(shapes) <= Counter(shape for shape, _ in event.inputs)


def _types(call: CallSpec, event: Event) -> dict[str, str]:
    """Ports with another float type than in the recorded step."""
    left = list(event.inputs or ())
    found: dict[str, str] = {}
    for port, spec in call.ports:
        index = next((i for i, (shape, _) in enumerate(left) if shape == spec.shape), None)
        if index is not None:
            type = left.pop(index)[1]
            if type is not None and spec.is_float and type != spec.dtype:
                found[port] = type
    return found


def _format(types: Mapping[int, Mapping[str, str]]) -> str:
    """The format of the step: autocast gives 16 bits to some operators."""
    came = {type for changed in types.values() for type in changed.values()}
    amp = next((name for name, type in AMP_DTYPES.items() if type in came), None)
    return base_format(cast(Amp | None, amp))


def _texts(call: CallSpec, types: Mapping[str, str], format: str) -> list[str]:
    """The call as it was; under autocast also with all types as recorded, and with all of them short.

    Which operators give 16 bits isn't the same on all devices: a prediction may expect others than the trace had.
    """
    short = next((type for name, type in AMP_DTYPES.items() if base_format(cast(Amp, name)) == format), None)
    traced = {port: spec.with_(dtype=types[port]) for port, spec in call.ports if port in types}
    if short is None:
        return [call.key(traced)]
    inputs = {p: s.with_(dtype=short) for p, s in call.ports if s.is_float and p not in ("weight", "bias")}
    return list(dict.fromkeys([call.key(traced), call.key(inputs), call.key()]))


def _costs(steps: list[_Read]) -> dict[Key, OperatorCost]:
    """Means over the middle half of the steps in each format. Unlike medians, means add up to a step."""
    rows: dict[Key, list[tuple[float, float]]] = defaultdict(list)
    first: dict[Key, int] = {}
    for format in {step.format for step in steps}:
        for step in middle_half([step for step in steps if step.format == format], key=lambda step: step.total):
            for position, keys in step.keys.items():
                for rank, key in enumerate(keys):  # an observed key replaces an assumed one
                    if rank < first.get(key, len(keys)):
                        rows[key], first[key] = [], rank
                    if rank == first[key]:
                        rows[key].append((step.forward[position], step.backward[position]))
            for key, seconds in step.gradients.items():
                rows[key] += [(0.0, taken) for taken in seconds]
    return {key: _cost(key, values) for key, values in rows.items()}


def _cost(key: Key, rows: list[tuple[float, float]]) -> OperatorCost:
    forward, backward = (statistics.fmean(column) for column in zip(*rows, strict=True))
    return OperatorCost(
        operator=key[0],
        format=key[1],
        forward=OperatorTime(seconds=forward, repetitions=len(rows)),
        backward=OperatorTime(seconds=backward, repetitions=len(rows)) if backward else None,
    )


def _optimizers(trace: Trace) -> list[TensorsCost]:
    """Times of optimizer steps, which torch annotates in every trace; on a GPU, the time of their kernels.

    What isn't annotated is free here: its time is part of the step's fixed work.
    """
    taken: dict[str, list[float]] = defaultdict(list)
    for window in trace.optimizing:
        own = [k for k in trace.kernels if k.launched is not None and window.start <= k.launched < window.end]
        microseconds = sum(k.end - k.start for k in own) if trace.on_gpu else window.end - window.start
        taken[window.name].append(1e-6 * microseconds)
    found: dict[str, float] = {"zero_grad": 0.0}
    for name, times in taken.items():
        words = re.fullmatch(r"Optimizer\.(step|zero_grad)#(\w+)\.\w+", name)
        if words is not None:
            own_name = _OPTIMIZERS.get(words[2].lower(), words[2].lower())
            keys = ["zero_grad"] if words[1] == "zero_grad" else [f"{own_name}/{w}" for w in ("loop", "foreach")]
            found.update(dict.fromkeys(keys, statistics.median(times)))
    if not any("/" in key for key in found):
        found.update(dict.fromkeys(("sgd/loop", "sgd/foreach", "adamw/loop", "adamw/foreach"), 0.0))
    return [TensorsCost(name=key, per_element=0.0, per_tensor=0.0, fixed=seconds) for key, seconds in found.items()]
