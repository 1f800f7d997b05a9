"""Import QSync's mappers: .npy files with a pickled dictionary of bits by layer."""

from __future__ import annotations

import fnmatch
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from bitwright.core.errors import BitwrightError, PlanError, Problem, did_you_mean, log_warnings
from bitwright.core.registry import KERNELS
from bitwright.graph import Graph, Op
from bitwright.importers.safe_pickle import load_npy
from bitwright.plan.compute import FLOAT, ComputeSpec
from bitwright.plan.plan import Device, Plan

__all__ = ["MapperSummary", "load_mapper", "plan_of_mapper", "summarize_mapper"]

BITS = (8, 16, 19, 32)
"""The bit widths of a mapper; 19 means TF32, which PyTorch sets for the whole process."""
_KINDS = {
    **dict.fromkeys(("conv", "conv2d"), "conv2d"),
    **dict.fromkeys(("linear", "fc"), "linear"),
    **dict.fromkeys(("layernorm", "layer_norm"), "layer_norm"),
    **dict.fromkeys(("bn", "batchnorm", "batchnorm2d", "batch_norm"), "batch_norm"),
    **dict.fromkeys(("maxpool2d", "max_pool2d"), "max_pool2d"),
    **{name: name for name in ("embedding", "matmul", "relu", "gelu", "softmax")},
}
_MODULES: dict[str, tuple[type[nn.Module], ...]] = {
    "conv2d": (nn.Conv2d,),
    "linear": (nn.Linear,),
    "layer_norm": (nn.LayerNorm,),
    "batch_norm": (nn.BatchNorm2d,),
    "embedding": (nn.Embedding,),
    "max_pool2d": (nn.MaxPool2d,),
}
_INTEGER = ("conv2d", "linear")  # QSync has integer kernels for these; all others run in FP16 below 32 bits


def load_mapper(path: str | Path) -> dict[str, int]:
    """Read the bits of each layer from a file."""
    value = load_npy(path)
    if not isinstance(value, Mapping):
        fix = "a mapper is a dictionary of bits by layer"
        raise BitwrightError("not a mapper", where=str(path), value=type(value).__name__, fix=fix, code="invalid-value")
    return {str(key): _bits(bits) for key, bits in value.items()}


@dataclass(frozen=True, kw_only=True)
class MapperSummary:
    """What a mapper runs in 8, 16 and 32 bits."""

    counts: Mapping[int, Mapping[str, int]]
    """The number of layers of each kind, by bits."""
    raised: tuple[str, ...] = ()
    """Layers with 8 bits in the file that QSync runs in 16 bits, since it has no 8-bit kernel for them."""

    def __str__(self) -> str:
        parts = []
        for bits, kinds in sorted(self.counts.items()):
            text = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
            parts.append(f"{bits} bit: {text}")
        if self.raised:
            parts.append(f"{len(self.raised)} layers have 8 bits in the file and run in 16")
        return "; ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """The counts and the raised layers."""
        counts = {str(bits): dict(kinds) for bits, kinds in self.counts.items()}
        return {"counts": counts, "raised": list(self.raised)}


def summarize_mapper(mapper: Mapping[str, Any]) -> MapperSummary:
    """Count the layers of a mapper by kind and bits. Keys that are names of modules have the kind `module`.

    >>> print(summarize_mapper({"conv_0": 8, "conv2d_1": 16, "layernorm_0": 8, "linear_0": 32}))
    8 bit: 1 conv2d; 16 bit: 1 conv2d, 1 layer_norm; 32 bit: 1 linear; 1 layers have 8 bits in the file and run in 16
    """
    problems = list(_width_problems(mapper))
    if problems:
        raise PlanError(problems, title="the mapper has problems")
    counts: dict[int, Counter[str]] = defaultdict(Counter)
    raised = []
    for key, bits in mapper.items():
        kind = _split(key)[0] or "module"
        runs = _runs(kind, bits)
        counts[runs][kind] += 1
        if runs != bits and bits == 8:
            raised.append(key)
    return MapperSummary(counts={bits: dict(kinds) for bits, kinds in counts.items()}, raised=tuple(raised))


def plan_of_mapper(
    mapper: Mapping[str, Any],
    graph: Graph,
    *,
    model: nn.Module | None = None,
    kind: str | None = None,
    exclude: Sequence[str] = (),
) -> Plan:
    """The plan of a mapper. With `kind`, it is the section of that device.

    Layers have a module's name, or are counted by kind in the order in which the model defines them (`named_modules`),
    as `conv2d_0` or `linear_7`. Without `model`, the order of the parameters replaces it, which differs only if the
    model has layers that it doesn't run. Modules whose names match `exclude` are not counted. A layer whose precision
    has no kernel here stays in float; the plan says so.
    """
    layers = _Layers(graph, model, exclude)
    compute: dict[str, ComputeSpec] = {}
    problems: list[Problem] = []
    idle: list[str] = []
    for key, bits in mapper.items():
        found = layers.find(key)
        if found is None:
            fix = did_you_mean(key, graph.by_name)
            problems.append(
                Problem(what="the model has no such layer", where="mapper", value=key, fix=fix, code="unknown-name")
            )
        elif not found:
            idle.append(key)
        elif _is_width(bits):
            compute |= {op.name: _spec(op, key, bits) for op in found}
    problems += _width_problems(mapper)
    if problems:
        raise PlanError(problems, title="the mapper doesn't fit the model")
    if idle:
        log_warnings([Problem(what="the model doesn't run these layers", where=", ".join(idle), code="no-effect")])
    plan = Plan(compute=compute) if kind is None else Plan(devices={kind: Device(compute=compute)})
    problems = plan.validate(graph)
    if problems:
        raise PlanError(problems, title="the plan of the mapper has problems")
    return plan


def _spec(op: Op, key: str, bits: int) -> ComputeSpec:
    why = f"{key}: {bits} bits in QSync's mapper"
    format = {8: "int8", 16: "fp16"}.get(_runs(op.kind, bits), FLOAT)
    if format == FLOAT:
        return ComputeSpec(format=FLOAT, why=why)
    spec = ComputeSpec(format=format, why=why)
    reason = KERNELS.get(format).refuses(op, spec)
    return spec if reason is None else ComputeSpec(format=FLOAT, why=f"{why}; {reason}")


def _runs(kind: str, bits: int) -> int:
    """The bits that QSync runs a layer with."""
    if bits == 19:
        return 32
    return bits if bits > 8 or kind in (*_INTEGER, "module") else 16


class _Layers:
    """The operators of a model by name and by number."""

    def __init__(self, graph: Graph, model: nn.Module | None, exclude: Sequence[str]) -> None:
        self.graph = graph
        self.excluded = exclude
        self.modules: dict[str, list[Op]] = defaultdict(list)
        for op in graph.ops:
            self.modules[op.module].append(op)
        self.numbered = self._by_parameters() if model is None else self._by_definition(model)

    def find(self, key: str) -> list[Op] | None:
        """The operators of a key: several if a module is called several times, none if the model doesn't run it."""
        for name in (key, key.removeprefix("module.")):  # DDP's prefix
            if name in self.graph.by_name:
                return [self.graph.by_name[name]]
        kind, number = _split(key)
        groups = self.numbered.get(kind, [])
        return groups[number] if kind and number < len(groups) else None

    def _by_definition(self, model: nn.Module) -> dict[str, list[list[Op]]]:
        groups: dict[str, list[list[Op]]] = defaultdict(list)
        for name, module in model.named_modules():
            for kind, types in _MODULES.items():
                if isinstance(module, types) and not self._is_excluded(name):
                    groups[kind].append([op for op in self.modules.get(name, []) if op.kind == kind])
        return {**self._by_call(), **groups}

    def _by_parameters(self) -> dict[str, list[list[Op]]]:
        owners = [name.rpartition(".")[0] for parameter in self.graph.parameters for name in parameter.names]
        place = {name: index for index, name in reversed(list(enumerate(owners)))}
        groups = self._by_call()
        for own in groups.values():
            own.sort(key=lambda ops: place.get(ops[0].module, len(owners)))
        return groups

    def _by_call(self) -> dict[str, list[list[Op]]]:
        """Operators in the order of their first call; the calls of one module belong together."""
        groups: dict[str, dict[str, list[Op]]] = defaultdict(dict)
        for op in self.graph.ops:
            if not self._is_excluded(op.module):
                owner = op.module if op.kind in _MODULES else op.name
                groups[op.kind].setdefault(owner, []).append(op)
        return {kind: list(own.values()) for kind, own in groups.items()}

    def _is_excluded(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.excluded)


def _split(key: str) -> tuple[str, int]:
    """`layernorm_3` as ("layer_norm", 3); ("", 0) for a name of a module."""
    name, _, number = key.rpartition("_")
    kind = _KINDS.get(name.lower())
    plain = number.isascii() and number.isdigit() and len(number) < 10  # "²" is a digit, too
    return (kind, int(number)) if kind is not None and plain else ("", 0)


def _width_problems(mapper: Mapping[str, Any]) -> Iterator[Problem]:
    for key, bits in mapper.items():
        if not _is_width(bits):
            fix = f"one of {', '.join(map(str, BITS))}"
            yield Problem(what="unknown bit width", where=f"mapper.{key}", value=bits, fix=fix, code="invalid-value")


def _is_width(bits: Any) -> bool:
    return isinstance(bits, int) and bits in BITS


def _bits(value: Any) -> int:
    whole = isinstance(value, int | float) and abs(value) < 2**31 and int(value) == value
    return int(value) if whole else value
