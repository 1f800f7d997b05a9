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
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from typing import cast

from bitwright.core.errors import BitwrightError
from bitwright.importers.trace_events import Event, Shape, Trace, TracedStep, read_trace, training_steps
from bitwright.profiling.cost_key import CallSpec
from bitwright.profiling.device_profile import DeviceProfile, OperatorCost, OperatorTime, TensorsCost
from bitwright.profiling.execution import base_format
from bitwright.profiling.step_graph import StepGraph
from bitwright.profiling.step_timer import ACCUMULATE, Key
from bitwright.profiling.timing import middle_half
from bitwright.training.config import AMP_DTYPES, Amp

_WARM_UP = 1.25  # a leading step that takes so many times the median of the others is warm-up
# Names of operators in torch's dispatcher; all others have the name of their kind.
_ATEN = {
    "matmul": ("matmul", "bmm", "mm"),
    "linear": ("linear", "addmm"),
    "getitem": ("slice", "select", "index"),
    "contiguous": ("contiguous", "clone"),
    "max_pool2d": ("max_pool2d", "max_pool2d_with_indices"),
}


def import_trace(path: Path, graph: StepGraph, *, device: str | None = None) -> DeviceProfile:
    """Match the operators of the trace with those of the recorded step by kind, shapes and order, and average them."""
    trace = read_trace(path)
    steps = training_steps(trace.tops)
    read = [_read(step, graph) for step in steps]
    most = max((len(step.matched) for step in read), default=0)
    if most and not any(step.backward for step in steps):
        raise BitwrightError(
            "the trace has no backward pass",
            where=str(path),
            value=f"{len(trace.tops)} operators",
            fix="record training steps: forward, backward and optimizer",
            code="no-backward",
        )
    if not most:
        raise BitwrightError(
            "the trace has no operator of this model",
            where=str(path),
            value=f"{len(trace.tops)} operators",
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
    note = _note(path, trace, whole, graph)
    return DeviceProfile(
        bitwright_profile=1,
        device=device or trace.device or ("a GPU" if trace.on_gpu else "a CPU"),
        source="imported",
        note=note,
        operators=list(costs.values()),
        tensors=_optimizers(trace.annotated),
    )


def _note(path: Path, trace: Trace, steps: list[_Read], graph: StepGraph) -> str:
    """How well the trace fits: matches by shapes are certain, matches by order are not."""
    missing = len(graph.ops) - len(steps[0].matched)
    parts = [f"from {path.name}", f"{len(steps)} steps"]
    if not steps[0].by_shapes:
        parts.append("the trace has no shapes: operators were matched by kind and order, which is less certain")
    parts.append(f"{missing} of {len(graph.ops)} operators weren't in the trace and count as free")
    lost, total = sum(step.unmatched for step in steps), sum(step.total + step.unmatched for step in steps)
    if total and lost > 0.001 * total:
        parts.append(f"{100 * lost / total:.1f} % of the traced time belongs to no operator of the model")
    waits = [kernel for kernel in trace.kernels if kernel.kind == "collective"]
    if waits:
        parts.append(f"{len(waits)} kernels of collectives are not part of the profile")
    return "; ".join(parts)


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
    unmatched: float = 0.0
    """Seconds of events that belong to no operator."""
    keys: dict[int, list[Key]] = field(default_factory=dict)
    """Cost keys by position; the loss comes after the last operator. Several if the types are ambiguous."""
    forward: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    backward: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    gradients: dict[Key, list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def total(self) -> float:
        return sum(self.forward.values()) + sum(self.backward.values())


def _read(step: TracedStep, graph: StepGraph) -> _Read:
    """Assign each event to an operator, or to the operator before it; events after the last operator are the loss."""
    shaped = any(event.inputs for event in step.forward)
    found = _match(step.forward, graph) if shaped else _match_by_order(step.forward, graph)
    types = {position: _types(graph.ops[position].call, event) for position, event in found.items()}
    read = _Read(_format(types), set(found), shaped)
    at = {id(event): position for position, event in found.items()}
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
                read.unmatched += event.seconds
        else:
            read.unmatched += event.seconds
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


def _optimizers(annotated: Mapping[str, Mapping[str, list[float]]]) -> list[TensorsCost]:
    """Times of optimizer steps, which torch annotates in every trace; on a GPU, the time of their kernels."""
    found: dict[str, float] = {}
    for name, times in {**annotated["user_annotation"], **annotated["gpu_user_annotation"]}.items():
        words = re.fullmatch(r"Optimizer\.(step|zero_grad)#(\w+)\.\w+", name)
        if words is not None:
            keys = (
                ["zero_grad"] if words[1] == "zero_grad" else [f"{words[2].lower()}/{w}" for w in ("loop", "foreach")]
            )
            found.update(dict.fromkeys(keys, statistics.median(times)))
    return [TensorsCost(name=key, per_element=0.0, per_tensor=0.0, fixed=seconds) for key, seconds in found.items()]
