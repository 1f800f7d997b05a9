"""The `compute` section of a plan: operators that run in low precision, by name or pattern."""

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
    """The kernel: int8, bf16, fp16, …. `float` in a device's section disables the kernel."""
    backward: tuple[str, ...] = _GRADIENTS[:1]
    """The backward products that also run in this precision: of the `input`, of the `weight`."""
    stochastic: bool = False
    """Whether gradients are rounded stochastically (unbiased)."""
    scales: str = _SCALES[0]
    """Integer scales: one per `row` (a sample or token; an output of a weight), or one per `tensor`."""
    why: str = ""

    @property
    def is_low_precision(self) -> bool:
        """Whether the operator runs in low precision."""
        return self.format != FLOAT

    @property
    def per_tensor(self) -> bool:
        """Whether each tensor has a single scale."""
        return self.scales == _SCALES[1]

    def entry(self) -> dict[str, Any] | str:
        """The entry in a plan file, without default values."""
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        if "backward" in changed:
            changed["backward"] = list(self.backward)
        return self.format if set(changed) <= {"format"} else {"format": self.format, **changed}


def resolved(layers: list[Mapping[str, ComputeSpec]], graph: Graph) -> dict[str, ComputeSpec]:
    """The spec of each operator. In each layer, exact names override patterns, and later entries earlier ones."""
    found: dict[str, ComputeSpec] = {}
    for op in graph.ops:
        for layer in layers:
            keys = [key for key in reversed(list(layer)) if fnmatch.fnmatchcase(op.name, key) or key == op.name]
            if keys:
                spec = layer[op.name if op.name in layer else keys[0]]
                # a pattern applies to the operators that the kernel supports
                exact = op.name in layer
                if exact or not spec.is_low_precision or KERNELS.get(spec.format).refuses(op, spec) is None:
                    found[op.name] = spec
                    break
    return found


def problems_of(
    compute: Mapping[str, ComputeSpec], sites: Mapping[str, Any], graph: Graph | None, prefix: str
) -> Iterator[Problem]:
    """All problems of one section."""
    for key, spec in compute.items():
        where = f"{prefix}compute.{key}"
        if spec.is_low_precision and spec.format not in KERNELS:
            fix = did_you_mean(spec.format, [*KERNELS.names(), FLOAT])
            yield Problem(what="unknown kernel", where=where, value=spec.format, fix=fix, code="unknown-kernel")
            continue
        wrong = [name for name in spec.backward if name not in _GRADIENTS]
        if wrong:
            fix = f"use some of: {', '.join(_GRADIENTS)}"
            yield Problem(
                what="unknown product of the backward pass",
                where=where,
                value=wrong[0],
                fix=fix,
                code="unknown-product",
            )
        if spec.scales not in _SCALES:
            fix = f"use one of: {', '.join(_SCALES)}"
            yield Problem(
                what="unknown granularity of scales", where=where, value=spec.scales, fix=fix, code="unknown-scales"
            )
        quantized = [site for site, one in sites.items() if site.rpartition(":")[0] == key and one.quantizes]
        if spec.is_low_precision and quantized:
            yield Problem(
                what="the operator has a kernel and a simulated quantizer",
                where=where,
                value=quantized[0],
                fix="remove the site or the kernel",
                code="kernel-and-quantizer",
            )
        if graph is not None:
            yield from _against(key, spec, graph, where)


def _against(key: str, spec: ComputeSpec, graph: Graph, where: str) -> Iterator[Problem]:
    found = [op for op in graph.ops if op.name == key or fnmatch.fnmatchcase(op.name, key)]
    if not found:
        yield Problem(
            what="matches no operator of the model",
            where=where,
            value=key,
            fix=did_you_mean(key, graph.by_name),
            code="unknown-operator",
        )
    elif spec.is_low_precision:
        kernel = KERNELS.get(spec.format)
        reasons = [(kernel.refuses_named if op.name == key else kernel.refuses)(op, spec) for op in found]
        if all(reasons):
            yield Problem(
                what=str(reasons[0]),
                where=where,
                value=spec.format,
                fix="keep it in float",
                code="kernel-not-applicable",
            )
