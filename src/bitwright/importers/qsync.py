"""Import QSync's mappers: .npy files with a pickled dictionary of bits by layer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bitwright.core.errors import BitwrightError, PlanError, Problem, did_you_mean
from bitwright.graph import Graph, Op
from bitwright.importers.safe_pickle import load_npy
from bitwright.plan.compute import FLOAT, ComputeSpec
from bitwright.plan.plan import Device, Plan

FORMATS = {8: "int8", 16: "fp16", 19: FLOAT, 32: FLOAT}
"""Formats by QSync's number of bits; 19 means TF32, which PyTorch sets for the whole process."""


def load_mapper(path: str | Path) -> dict[str, int]:
    """Read the bits of each layer from a file."""
    value = load_npy(path)
    if not isinstance(value, Mapping):
        fix = "a mapper is a dictionary of bits by layer"
        raise BitwrightError("not a mapper", where=str(path), value=type(value).__name__, fix=fix, code="invalid-value")
    return {str(key): _bits(bits) for key, bits in value.items()}


def plan_of_mapper(mapper: Mapping[str, Any], graph: Graph, *, kind: str | None = None) -> Plan:
    """The plan of a mapper. With `kind`, it is the section of that device.

    Layers have a module's name, or are counted by kind in the order in which they run, as `conv2d_0` or `linear_7`.
    """
    counted: dict[str, list[Op]] = {}
    for op in graph.ops:
        counted.setdefault(op.kind, []).append(op)
    compute: dict[str, ComputeSpec] = {}
    problems: list[Problem] = []
    for key, bits in mapper.items():
        found = _find(key, graph, counted)
        if found is None:
            fix = did_you_mean(key, graph.by_name)
            problems.append(
                Problem(what="the model has no such layer", where="mapper", value=key, fix=fix, code="unknown-name")
            )
        elif not isinstance(bits, int) or bits not in FORMATS:
            fix = f"one of {', '.join(map(str, FORMATS))}"
            problems.append(
                Problem(what="unknown bit width", where=f"mapper.{key}", value=bits, fix=fix, code="invalid-value")
            )
        else:
            compute[found.name] = ComputeSpec(format=FORMATS[bits], why=f"{key}: {bits} bits in QSync's mapper")
    if problems:
        raise PlanError(problems, title="the mapper doesn't fit the model")
    plan = Plan(compute=compute) if kind is None else Plan(devices={kind: Device(compute=compute)})
    problems = plan.validate(graph)
    if problems:
        raise PlanError(problems, title="the plan of the mapper has problems")
    return plan


def _find(key: str, graph: Graph, counted: Mapping[str, list[Op]]) -> Op | None:
    names = (key, key.removeprefix("module."))  # DDP's prefix
    for name in names:
        if name in graph.by_name:
            return graph.by_name[name]
    kind, _, number = key.rpartition("_")
    kind = {"conv": "conv2d", "conv2d": "conv2d", "fc": "linear"}.get(kind.lower(), kind.lower())
    own = counted.get(kind, [])
    plain = number.isascii() and number.isdigit() and len(number) < 10  # "²" is a digit, too
    return own[int(number)] if plain and int(number) < len(own) else None


def _bits(value: Any) -> int:
    whole = isinstance(value, int | float) and abs(value) < 2**31 and int(value) == value
    return int(value) if whole else value
