"""`StepGraph`: what one training step of a float model does, recorded from a real one; the same on every device.

Operators in order with everything that their cost depends on, the memory that tensors share, what backward keeps, and
the order in which parameters get their gradients. It is JSON: a step that was recorded here can be predicted anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

from pydantic import TypeAdapter

from bitwright.documents import parse_json, read_text, validated
from bitwright.errors import BitwrightError, PlanError, Problem
from bitwright.files import write_text
from bitwright.profile.signature import CallSpec, TensorSpec

VERSION = 1
_FIX = "record it again: bitwright profile WORKLOAD --graph FILE"
_MOST_BYTES = 2**50


@dataclass(frozen=True)
class Storage:
    """A piece of memory that one or several tensors look at."""

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
    """For each output, its storage: a new one, or that of an input which it looks into."""
    saved: tuple[str, ...] = ()
    """Ports that backward keeps, and `output`."""
    saved_own: int = 0
    """Bytes that backward keeps and nobody else has."""

    @cached_property
    def has_backward(self) -> bool:
        """Whether anything of it wants a gradient."""
        return any(output.grad for output in self.outputs)


@dataclass(frozen=True, kw_only=True)
class StepGraph:
    """The operators of a step's forward; backward runs them the other way round."""

    model: str
    ops: tuple[StepOp, ...]
    storages: tuple[Storage, ...]
    parameters: dict[str, TensorSpec]
    gradient_order: tuple[str, ...]
    """Parameters as their gradients come."""
    loss: CallSpec
    """The loss as if it were an operator."""
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
        """Where each operator stands."""
        return {op.name: index for index, op in enumerate(self.ops)}

    @cached_property
    def uses(self) -> dict[str, str]:
        """For each parameter the first operator that reads it: the last to give it a gradient."""
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
        """Write it, whole or not at all."""
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
        fix = "make it: bitwright profile WORKLOAD --graph FILE"
        return StepGraph.from_json(read_text(path, what="the step graph", fix=fix), where=str(path))


def _contradictions(graph: StepGraph) -> Iterator[Problem]:
    """What a schema can't see: sizes below zero, and storages, ports or parameters that aren't there."""

    def problem(what: str, where: str, value: object) -> Problem:
        return Problem(what=what, where=where, value=value, fix=_FIX, code="invalid-value")

    known = range(len(graph.storages))
    for index, storage in enumerate(graph.storages):
        if not 0 <= storage.bytes < _MOST_BYTES:
            yield problem("a storage has no such size", f"storages.{index}", storage.bytes)
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
            yield problem("there is no such storage", f"{where}.reads", reads)
        if any(number >= len(call.ports) for number in call.tokens):
            yield problem("the template names a port that isn't there", where, call.template)
        for port, spec in call.ports:
            if not spec.possible:
                yield problem("no tensor has such a shape", f"{where}.{port}", (spec.shape, spec.strides))
    for op in graph.ops:
        if len(op.writes) != len(op.outputs) or any(number not in known for number in op.writes):
            yield problem("each output needs a storage", f"ops.{op.name}.writes", op.writes)
        if not 0 <= op.saved_own < _MOST_BYTES:
            yield problem("a size is out of range", f"ops.{op.name}.saved_own", op.saved_own)
        for spec in op.outputs:
            if not spec.possible:
                yield problem("no tensor has such a shape", f"ops.{op.name}.outputs", (spec.shape, spec.strides))
    if len({op.name for op in graph.ops}) != len(graph.ops):
        yield problem("two operators have the same name", "ops", len(graph.ops))
    for name, spec in graph.parameters.items():
        if not spec.possible:
            yield problem("no tensor has such a shape", f"parameters.{name}", (spec.shape, spec.strides))
    strange = [name for name in graph.gradient_order if name not in graph.parameters]
    if strange:
        yield problem("there is no such parameter", "gradient_order", strange)
