"""Gradients in the order of the backward pass, and DDP's gradient buckets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bitwright.plan import FoldSpec, Plan
from bitwright.profiling.cost_key import TensorSpec
from bitwright.profiling.execution import Cast, Execution
from bitwright.profiling.step_graph import StepGraph, StepOp

Gradient = tuple[str, TensorSpec]

# What each folding strategy gives at the weight, in order; what isn't named has no gradient (0), or has it at the norm
# itself (4).
_AT_WEIGHT: Mapping[int, tuple[str, ...]] = {
    0: ("scale", "weight"),
    1: ("beta", "scale", "weight", "gamma"),
    2: ("beta", "scale", "gamma", "weight"),
    3: ("scale", "beta", "gamma", "weight"),
    4: ("weight", "scale", "gamma"),
}
_PLAIN: tuple[str, ...] = ("weight", "scale")


def gradients_of(graph: StepGraph, op: StepOp, execution: Execution, plan: Plan) -> tuple[Gradient, ...]:
    """Return the names and tensors of an operator's gradients, including scales of quantizers."""
    own = _parameters(graph, op)
    folded = plan.folds.get(op.name)
    if folded is not None and folded.into in graph.position:
        left = {"bias"} if folded.strategy == 4 else set()
        own = {port: gradient for port, gradient in own.items() if port in left}
    fold = next(((norm, spec) for norm, spec in plan.folds.items() if spec.into == op.name), None)
    return tuple(dict(_in_order(graph, op, execution, own, fold)).items())


def _in_order(
    graph: StepGraph, op: StepOp, execution: Execution, own: dict[str, Gradient], fold: tuple[str, FoldSpec] | None
) -> Iterator[Gradient]:
    output = execution.cast_at("output")
    if output is not None:
        yield from _scale(op, output)
    casts = [cast for cast in execution.casts if cast.port != "output"]
    cast_ports = {cast.port for cast in casts} | ({"weight"} if fold is not None else set())
    direct = [gradient for port, gradient in own.items() if port not in cast_ports]
    yield from sorted(direct, key=lambda gradient: graph.gradient_order.index(gradient[0])) if direct[1:] else direct
    ports = [cast.port for cast in casts]
    if "weight" in cast_ports and "weight" not in ports:
        ports.append("weight")
    for port in reversed(ports):
        cast = execution.cast_at(port)
        pieces = {
            "weight": [own[port]] if port in own else [],
            "scale": list(_scale(op, cast)) if cast is not None else [],
        }
        words = _PLAIN
        if port == "weight" and fold is not None:
            norm, spec = fold
            affine = _parameters(graph, graph.by_name[norm]) if norm in graph.position else {}
            pieces["gamma"] = [affine["weight"]] if "weight" in affine else []
            pieces["beta"] = [affine["bias"]] if "bias" in affine else []
            words = _AT_WEIGHT[spec.strategy]
        for word in words:
            yield from pieces[word]


def _parameters(graph: StepGraph, op: StepOp) -> dict[str, Gradient]:
    """By port, those that no operator before it reads as well."""
    found: dict[str, Gradient] = {}
    for source, (port, spec) in zip(op.sources, op.call.ports, strict=True):
        name = source.removeprefix("param:")
        if source.startswith("param:") and spec.grad and graph.uses.get(name) == op.name:
            found[port] = (name, spec)
    return found


def _scale(op: StepOp, cast: Cast) -> Iterator[Gradient]:
    """A quantizer's own, if it learns and isn't another operator's."""
    if not cast.learns or (cast.state or op.name).rpartition(":")[0] not in ("", op.name):
        return
    spec = op.call.port(cast.port)
    channels = cast.per_channel and cast.weight
    shape = (spec.shape[0],) if channels and spec is not None and spec.shape else ()
    yield f"bitwright.{op.name}:{cast.port}.scale", TensorSpec(shape, "float32", True)


_MIB = 1 << 20


@dataclass(frozen=True)
class Bucket:
    """Gradients that one all-reduce sends."""

    names: tuple[str, ...]
    bytes: int


def limits(bucket_cap_mb: float | None) -> list[int]:
    """DDP's size limits. Without a user's size, the first bucket is smaller."""
    from torch.nn.parallel.distributed import _BucketCapacityConfig

    config = _BucketCapacityConfig.create(bucket_cap_mb, None, False)  # type: ignore[arg-type]  # it takes floats, too
    first, rest = config.first_bucket_bytes_cap, config.bucket_bytes_cap
    return [first, rest] if first < rest else [rest]


@lru_cache(maxsize=4096)
def _stand_in(shape: tuple[int, ...], dtype: str) -> Tensor:
    """A tensor without memory; planners ask for buckets thousands of times."""
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


def make_buckets(trained: Sequence[tuple[str, TensorSpec]], bucket_cap_mb: float | None) -> list[Bucket]:
    """Return the buckets that DDP uses after its first step, when it knows the order of gradients.

    >>> specs = [(name, TensorSpec((1 << 18,), "float32", True)) for name in "abc"]
    >>> [bucket.names for bucket in make_buckets(specs, 2)]
    [('a', 'b'), ('c',)]
    """
    if not trained:
        return []
    stand_ins = [_stand_in(spec.shape, spec.dtype) for _, spec in trained]
    assign: Any = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]
    indices, _ = assign(stand_ins, limits(bucket_cap_mb), [False] * len(stand_ins))
    # it groups by dtype; buckets are launched in the order of their last gradients
    found = sorted(indices, key=max)
    return [Bucket(tuple(trained[i][0] for i in group), sum(trained[i][1].bytes for i in group)) for group in found]
