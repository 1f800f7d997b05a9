"""`StepGraph`: what one training step of a float model does, recorded from a real one; the same on every device.

Operators in order with everything that their cost depends on, the memory that tensors share, what backward keeps, and
the order in which parameters get their gradients. It is JSON: a step that was recorded here can be predicted anywhere.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from bitwright.errors import BitwrightError
from bitwright.files import write_text
from bitwright.profile.signature import CallSpec, TensorSpec

VERSION = 1


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
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("version") != VERSION:
            raise BitwrightError(
                "not a step graph of this version", where=where, fix="record it again: bitwright profile"
            )
        return StepGraph(
            **{
                **data,
                "ops": tuple(_op(op) for op in data["ops"]),
                "storages": tuple(Storage(**storage) for storage in data["storages"]),
                "parameters": {name: _tensor(spec) for name, spec in data["parameters"].items()},
                "gradient_order": tuple(data["gradient_order"]),
                "loss": _call(data["loss"]),
                "loss_sources": tuple(data["loss_sources"]),
                "loss_reads": tuple(data["loss_reads"]),
            }
        )

    @staticmethod
    def load(path: Path) -> StepGraph:
        """Read a file."""
        return StepGraph.from_json(Path(path).read_text(encoding="utf-8"), where=str(path))


def _tensor(data: dict[str, Any]) -> TensorSpec:
    strides = data["strides"]
    return TensorSpec(tuple(data["shape"]), data["dtype"], data["grad"], None if strides is None else tuple(strides))


def _call(data: dict[str, Any]) -> CallSpec:
    ports = tuple((name, _tensor(spec)) for name, spec in data["ports"])
    return CallSpec(data["kind"], ports, data["template"], data["inplace"])


def _op(data: dict[str, Any]) -> StepOp:
    return StepOp(
        name=data["name"],
        call=_call(data["call"]),
        sources=tuple(data["sources"]),
        reads=tuple(data["reads"]),
        outputs=tuple(_tensor(spec) for spec in data["outputs"]),
        writes=tuple(data["writes"]),
        saved=tuple(data["saved"]),
        saved_own=data["saved_own"],
    )
