"""`StepGraph`: what one training step does, and `record_step`, which records it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from bitwright.core.arguments import strict
from bitwright.core.documents import parse_json, read_text
from bitwright.core.errors import BitwrightError, CaptureError, PlanError, Problem
from bitwright.core.files import write_text
from bitwright.core.schemas import validated
from bitwright.core.tensor_tree import as_call, batch_size, tensors_in, untouched
from bitwright.graph.capture import Recorder
from bitwright.graph.interception import install, uninstall
from bitwright.graph.operators import kind_of, locate
from bitwright.profiling.cost_key import LOSS, CallSpec, TensorSpec, describe
from bitwright.quantizers import find_attachment
from bitwright.training.config import StepSettings
from bitwright.training.step import Batch, autocast
from bitwright.workload import Loss, report_data_errors

VERSION = 1
_FIX = "record it again: bitwright profile WORKLOAD --graph FILE"
_MOST_BYTES = 2**50


@dataclass(frozen=True)
class Storage:
    """A block of memory that one or several tensors use."""

    bytes: int
    kind: str
    """`op`, `param`, `buffer`, `input`, `constant` or `unknown`."""


@dataclass(frozen=True, kw_only=True)
class StepOp:
    """One operator call."""

    name: str
    call: CallSpec
    sources: tuple[str, ...]
    """For each port, `op:name`, `param:name`, `input:name`, …"""
    reads: tuple[int, ...]
    """For each port, its storage."""
    outputs: tuple[TensorSpec, ...]
    writes: tuple[int, ...]
    """For each output, its storage: a new one, or that of an input of which it is a view."""
    saved: tuple[str, ...] = ()
    """Ports that are saved for backward, and `output`."""
    saved_own: int = 0
    """Bytes that are saved for backward and that no other call holds."""

    @cached_property
    def has_backward(self) -> bool:
        """Whether any of its tensors requires a gradient."""
        return any(output.grad for output in self.outputs)


@dataclass(frozen=True, kw_only=True)
class StepGraph:
    """The operators of a step's forward pass; backward runs them in reverse order."""

    model: str
    ops: tuple[StepOp, ...]
    storages: tuple[Storage, ...]
    parameters: dict[str, TensorSpec]
    gradient_order: tuple[str, ...]
    """Parameters in the order of their gradients."""
    loss: CallSpec
    """The loss, described like an operator."""
    loss_sources: tuple[str, ...] = ()
    loss_reads: tuple[int, ...] = ()
    buffer_bytes: int = 0
    input_bytes: int = 0
    samples: int = 1
    version: int = field(default=VERSION)

    @cached_property
    def by_name(self) -> dict[str, StepOp]:
        """Operators by name."""
        return {op.name: op for op in self.ops}

    @cached_property
    def position(self) -> dict[str, int]:
        """The position of each operator."""
        return {op.name: index for index, op in enumerate(self.ops)}

    @cached_property
    def readers(self) -> dict[str, list[int]]:
        """For each operator, the positions of the operators that read its result."""
        found: dict[str, list[int]] = {}
        for index, op in enumerate(self.ops):
            for source in op.sources:
                if source.startswith("op:"):
                    found.setdefault(source.removeprefix("op:"), []).append(index)
        return found

    @cached_property
    def uses(self) -> dict[str, str]:
        """For each parameter the first operator that reads it, which adds the last part of its gradient."""
        found: dict[str, str] = {}
        for op in self.ops:
            for source in op.sources:
                if source.startswith("param:"):
                    found.setdefault(source.removeprefix("param:"), op.name)
        return found

    def to_json(self) -> str:
        """A stable text."""
        return json.dumps(asdict(self), indent=None, sort_keys=True)

    def save(self, path: Path) -> Path:
        """Write the file atomically."""
        return write_text(path, self.to_json())

    @staticmethod
    def from_json(text: str, *, where: str = "step graph") -> StepGraph:
        """The inverse of `to_json`."""
        data = parse_json(text, where=where, what="the step graph", fix=_FIX)
        if not isinstance(data, dict) or data.get("version") != VERSION:
            raise BitwrightError("not a step graph of this version", where=where, fix=_FIX, code="unknown-version")
        graph: StepGraph = validated(TypeAdapter(StepGraph), data, title=f"{where} is not a step graph", fix=_FIX)
        problems = list(_contradictions(graph))
        if problems:
            raise PlanError(problems, title=f"{where} is not a step graph")
        return graph

    @staticmethod
    def load(path: Path) -> StepGraph:
        """Read a file."""
        fix = "create it: bitwright profile WORKLOAD --graph FILE"
        return StepGraph.from_json(read_text(path, what="the step graph", fix=fix), where=str(path))


def _contradictions(graph: StepGraph) -> Iterator[Problem]:
    """Check what a schema can't: negative sizes, and storages, ports or parameters that don't exist."""

    def problem(what: str, where: str, value: object) -> Problem:
        return Problem(what=what, where=where, value=value, fix=_FIX, code="invalid-value")

    known = range(len(graph.storages))
    for index, storage in enumerate(graph.storages):
        if not 0 <= storage.bytes < _MOST_BYTES:
            yield problem("invalid storage size", f"storages.{index}", storage.bytes)
    for name, value in (("buffer_bytes", graph.buffer_bytes), ("input_bytes", graph.input_bytes)):
        if not 0 <= value < _MOST_BYTES:
            yield problem("a size is out of range", name, value)
    if not 1 <= graph.samples < 2**40:
        yield problem("a step has at least one sample", "samples", graph.samples)
    calls = [(f"ops.{op.name}", op.call, op.sources, op.reads) for op in graph.ops]
    for where, call, sources, reads in [*calls, ("loss", graph.loss, graph.loss_sources, graph.loss_reads)]:
        if len(sources) != len(call.ports) or len(reads) != len(call.ports):
            yield problem("a call needs a source and a storage for each port", where, (len(sources), len(reads)))
        if any(number not in known for number in reads):
            yield problem("unknown storage", f"{where}.reads", reads)
        if any(number >= len(call.ports) for number in call.tokens):
            yield problem("the template names an unknown port", where, call.template)
        for port, spec in call.ports:
            if not spec.possible:
                yield problem("invalid tensor shape", f"{where}.{port}", (spec.shape, spec.strides))
    for op in graph.ops:
        if len(op.writes) != len(op.outputs) or any(number not in known for number in op.writes):
            yield problem("each output needs a storage", f"ops.{op.name}.writes", op.writes)
        if not 0 <= op.saved_own < _MOST_BYTES:
            yield problem("a size is out of range", f"ops.{op.name}.saved_own", op.saved_own)
        for spec in op.outputs:
            if not spec.possible:
                yield problem("invalid tensor shape", f"ops.{op.name}.outputs", (spec.shape, spec.strides))
    if len({op.name for op in graph.ops}) != len(graph.ops):
        yield problem("two operators have the same name", "ops", len(graph.ops))
    for name, spec in graph.parameters.items():
        if not spec.possible:
            yield problem("invalid tensor shape", f"parameters.{name}", (spec.shape, spec.strides))
    strange = [name for name in graph.gradient_order if name not in graph.parameters]
    if strange:
        yield problem("unknown parameter", "gradient_order", strange)


class _StepRecorder(Recorder):
    """Records arguments, shared memory and saved tensors, in addition to what `capture` records."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__(model, args, kwargs)
        self.made: list[StepOp] = []
        self.alive: list[Tensor] = []  # freed memory could be reused and mistaken for that of another tensor
        self.storages: list[Storage] = []
        self.places: dict[int, int] = {}
        self.kept: list[Tensor] = []

    def storage(self, tensor: Tensor, kind: str) -> int:
        """The index of a tensor's storage."""
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        if place not in self.places:
            self.alive.append(tensor)
            self.places[place] = len(self.storages)
            self.storages.append(Storage(storage.nbytes(), kind))
        return self.places[place]

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record the call and run it."""
        kind = kind_of(func)
        if kind is None:
            return func(*args, **kwargs)
        call = describe(kind, func, args, kwargs)
        tensors = [tensor for _, _, tensor in locate(kind, func, args, kwargs)]
        sources = [self._source(tensor)[0] for tensor in tensors]
        reads = tuple(self.storage(t, source.kind) for t, source in zip(tensors, sources, strict=True))
        self.kept = []
        before = len(self.ops)
        result = super().call(func, args, kwargs)
        if len(self.ops) == before:
            return result
        made = [tensor for _, tensor in tensors_in(result)] or tensors[:1]
        self.alive += made
        self._add(call, tuple(f"{s.kind}:{s.name}" for s in sources), reads, made)
        return result

    def _add(self, call: CallSpec, sources: tuple[str, ...], reads: tuple[int, ...], made: list[Tensor]) -> None:
        writes = tuple(self.storage(tensor, "op") for tensor in made)
        labels = {place: port for place, (port, _) in reversed(list(zip(reads, call.ports, strict=True)))}
        saved, own = self.saved_by(labels, set(writes))
        self.made.append(
            StepOp(
                name=self.ops[-1].name,
                call=call,
                sources=sources,
                reads=reads,
                outputs=tuple(TensorSpec.of(tensor) for tensor in made),
                writes=writes,
                saved=saved,
                saved_own=own,
            )
        )

    def saved_by(self, labels: dict[int, str], outputs: set[int]) -> tuple[tuple[str, ...], int]:
        """The tensors that the last call saves: ports by name, and bytes that only it holds."""
        found: dict[str, None] = {}
        own = 0
        seen: set[int] = set()
        for tensor in self.kept:
            place = self.places.get(tensor.untyped_storage().data_ptr())
            if place is None:
                own += tensor.untyped_storage().nbytes() if tensor.data_ptr() not in seen else 0
                seen.add(tensor.data_ptr())
                self.alive.append(tensor)
            elif place in labels:
                found[labels[place]] = None
            elif place in outputs:
                found["output"] = None
        return tuple(found), own

    def pack(self, tensor: Tensor) -> Tensor:
        """Autograd saves this tensor for backward."""
        self.kept.append(tensor)
        return tensor


@strict
def record_step(
    model: nn.Module, batch: Batch, loss: Loss, settings: StepSettings | None = None, *, name: str = "model"
) -> StepGraph:
    """Record forward, loss and backward of one batch. The model is left unchanged."""
    if find_attachment(model) is not None:
        raise CaptureError(
            "only a float model can be recorded",
            fix="call strip(model) first; the plan is applied to the recorded step",
            code="already-prepared",
        )
    settings = settings or StepSettings()
    inputs, target = batch
    args, kwargs = as_call(inputs)
    recorder = _StepRecorder(model, args, kwargs)
    gradients = [(p, p.grad) for p in model.parameters()]
    order: dict[str, None] = {}
    names = {p: n for n, p in model.named_parameters()}
    hooks = [
        p.register_post_accumulate_grad_hook(lambda p: order.setdefault(names[p])) for p in names if p.requires_grad
    ]
    for parameter in names:
        parameter.grad = None
    try:
        with untouched(model, train=True), torch.enable_grad():
            keeping = torch.autograd.graph.saved_tensors_hooks(recorder.pack, lambda tensor: tensor)
            with autocast(settings.amp), keeping:
                try:
                    install(model, recorder)
                    # use the copies that the recorder knows, because a model may write into its inputs
                    with report_data_errors("training", inputs):
                        output = model(*args, **kwargs)
                finally:
                    uninstall(model, recorder)
                value = loss(output, target)
            call = loss_call(loss, output, target)
            sources = tuple(str(recorder._source(tensor)[0]).partition("@")[0] for _, tensor in tensors_in(output))
            reads = tuple(recorder.storage(tensor, "unknown") for _, tensor in tensors_in(output))
            value.backward()
    finally:
        for hook in hooks:
            hook.remove()
        for parameter, gradient in gradients:
            parameter.grad = gradient
    return StepGraph(
        model=name,
        ops=tuple(recorder.made),
        storages=tuple(recorder.storages),
        parameters={name: TensorSpec.of(p) for p, name in names.items()},
        gradient_order=tuple(order),
        loss=call,
        loss_sources=sources,
        loss_reads=reads,
        buffer_bytes=sum(b.numel() * b.element_size() for b in model.buffers()),
        input_bytes=sum(t.numel() * t.element_size() for _, t in tensors_in((inputs, target))),
        samples=batch_size(inputs),
    )


def extrapolate(small: StepGraph, large: StepGraph, samples: int) -> StepGraph:
    """The step with another batch size, from two recorded ones: all sizes grow linearly with the batch.

    This gives the step of a batch that is too large for this machine. It needs no data and no time.
    """
    share = Fraction(samples - small.samples, large.samples - small.samples or 1)
    if small.samples == large.samples:
        raise BitwrightError(
            "both steps have the same batch size",
            where="large",
            value=large.samples,
            fix="record the second step with another batch size",
            code="invalid-value",
        )

    def number(low: int, high: int) -> int:
        value = low + (high - low) * share
        if value.denominator != 1 or value < 0:
            what = "a size isn't proportional to the batch"
            fix = "choose a batch size at the same distance as those of the recorded steps"
            raise BitwrightError(what, where="samples", value=samples, fix=fix, code="invalid-value")
        return int(value)

    def join(low: Any, high: Any) -> Any:
        if type(low) is not type(high):
            raise _other_steps(low, high)
        if isinstance(low, bool) or not isinstance(low, (int, str, tuple, dict)):
            if is_dataclass(low) and not isinstance(low, type):
                own = {one.name: join(getattr(low, one.name), getattr(high, one.name)) for one in fields(low)}
                return replace(low, **own)
            if low != high:
                raise _other_steps(low, high)
            return low
        if isinstance(low, int):
            return number(low, high)
        if isinstance(low, str):
            return low if low == high else _joined_text(low, high, number)
        if len(low) != len(high):
            raise _other_steps(low, high)
        if isinstance(low, tuple):
            return tuple(join(a, b) for a, b in zip(low, high, strict=True))
        return {key: join(value, high.get(key)) for key, value in low.items()}

    joined: StepGraph = join(small, large)
    return joined


def _joined_text(low: str, high: str, number: Callable[[int, int], int]) -> str:
    """Join two texts that differ in their numbers, such as the arguments of a call."""
    words, others = re.split(r"(\d+)", low), re.split(r"(\d+)", high)
    if words[::2] != others[::2]:
        raise _other_steps(low, high)
    pairs = enumerate(zip(words, others, strict=True))
    return "".join(a if index % 2 == 0 else str(number(int(a), int(b))) for index, (a, b) in pairs)


def _other_steps(low: object, high: object) -> BitwrightError:
    return BitwrightError(
        "the steps differ in more than their batch size",
        where="large",
        value=f"{str(low)[:80]} and {str(high)[:80]}",
        fix="record both steps with the same model, loss and settings",
        code="different-steps",
    )


def loss_call(loss: Loss, output: Any, target: Any) -> CallSpec:
    """The loss as an operator call; the outputs of the model are its ports."""
    name = getattr(loss, "__qualname__", type(loss).__name__)
    ports = tuple((path or "output", TensorSpec.of(tensor)) for path, tensor in tensors_in(output))
    words = [f"«{number}»" for number in range(len(ports))] + [str(TensorSpec.of(t)) for _, t in tensors_in(target)]
    return CallSpec("loss", ports, f"{LOSS}{name}({', '.join(words)})")
