"""`compute` of a plan: operators that really run in low precision, by name or pattern."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from bitwright.core.arguments import strict
from bitwright.core.errors import Problem, did_you_mean
from bitwright.core.registry import KERNELS
from bitwright.graph import Graph

FLOAT = "float"
_GRADIENTS = ("input", "weight")
_SCALES = ("row", "tensor")


@strict
@dataclass(frozen=True, kw_only=True)
class ComputeSpec:
    """How one operator is computed."""

    format: str = FLOAT
    """The kernel's name: int8, bf16, fp16, …; `float` where a device's section takes it back."""
    backward: tuple[str, ...] = _GRADIENTS[:1]
    """Which products of the backward pass run in that precision, too: of the `input`, of the `weight`."""
    stochastic: bool = False
    """Round gradients at random, in the mean to themselves."""
    scales: str = _SCALES[0]
    """Of integers: one for each `row` (a sample or token; an output of a weight), or one for the `tensor`."""
    why: str = ""

    @property
    def low(self) -> bool:
        """Whether anything is other than usual."""
        return self.format != FLOAT

    @property
    def whole(self) -> bool:
        """Whether a tensor has one scale."""
        return self.scales == _SCALES[1]

    def entry(self) -> dict[str, Any] | str:
        """As the file has it: only what differs from the defaults."""
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        if "backward" in changed:
            changed["backward"] = list(self.backward)
        return self.format if set(changed) <= {"format"} else {"format": self.format, **changed}


def resolved(layers: list[Mapping[str, ComputeSpec]], graph: Graph) -> dict[str, ComputeSpec]:
    """By exact operator; exact before patterns, later before earlier, layer by layer."""
    found: dict[str, ComputeSpec] = {}
    for op in graph.ops:
        for layer in layers:
            keys = [key for key in reversed(list(layer)) if fnmatch.fnmatchcase(op.name, key) or key == op.name]
            if keys:
                spec = layer[op.name if op.name in layer else keys[0]]
                # a pattern speaks of the operators that the kernel has
                exact = op.name in layer
                if exact or not spec.low or KERNELS.get(spec.format).refuses(op, spec) is None:
                    found[op.name] = spec
                    break
    return found


def problems_of(
    compute: Mapping[str, ComputeSpec], sites: Mapping[str, Any], graph: Graph | None, prefix: str
) -> Iterator[Problem]:
    """All that is wrong with one section."""
    for key, spec in compute.items():
        where = f"{prefix}compute.{key}"
        if spec.low and spec.format not in KERNELS:
            fix = did_you_mean(spec.format, [*KERNELS.names(), FLOAT])
            yield Problem(what="unknown kernel", where=where, value=spec.format, fix=fix)
            continue
        wrong = [name for name in spec.backward if name not in _GRADIENTS]
        if wrong:
            fix = f"use some of: {', '.join(_GRADIENTS)}"
            yield Problem(what="no such product of the backward pass", where=where, value=wrong[0], fix=fix)
        if spec.scales not in _SCALES:
            fix = f"use one of: {', '.join(_SCALES)}"
            yield Problem(what="no such choice of scales", where=where, value=spec.scales, fix=fix)
        quantized = [site for site, one in sites.items() if site.rpartition(":")[0] == key and one.quantizes]
        if spec.low and quantized:
            yield Problem(
                what="has a kernel and a simulated quantizer",
                where=where,
                value=quantized[0],
                fix="remove the site or the kernel",
            )
        if graph is not None:
            yield from _against(key, spec, graph, where)


def _against(key: str, spec: ComputeSpec, graph: Graph, where: str) -> Iterator[Problem]:
    found = [op for op in graph.ops if op.name == key or fnmatch.fnmatchcase(op.name, key)]
    if not found:
        yield Problem(
            what="matches no operator of the model", where=where, value=key, fix=did_you_mean(key, graph.by_name)
        )
    elif spec.low:
        reasons = [KERNELS.get(spec.format).refuses(op, spec) for op in found]
        if all(reasons):
            yield Problem(what=str(reasons[0]), where=where, value=spec.format, fix="leave it float")
