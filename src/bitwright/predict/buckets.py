"""Buckets of gradients as DDP makes them: its own function, its own limits, in the order in which gradients come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bitwright.profile.signature import TensorSpec

_MIB = 1 << 20


@dataclass(frozen=True)
class Bucket:
    """Gradients that travel together."""

    names: tuple[str, ...]
    bytes: int


def limits(bucket_cap_mb: float | None) -> list[int]:
    """DDP's limits: without a size of the user's, the first bucket is a small one."""
    from torch.nn.parallel.distributed import _BucketCapacityConfig

    config = _BucketCapacityConfig.create(bucket_cap_mb, None, False)  # type: ignore[arg-type]  # it takes floats, too
    first, rest = config.first_bucket_bytes_cap, config.bucket_bytes_cap
    return [first, rest] if first < rest else [rest]


@lru_cache(maxsize=4096)
def _stand_in(shape: tuple[int, ...], dtype: str) -> Tensor:
    """A tensor without memory; planners ask for buckets thousands of times."""
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


def make_buckets(trained: Sequence[tuple[str, TensorSpec]], bucket_cap_mb: float | None) -> list[Bucket]:
    """What DDP has after its first step, when it knows the order of gradients.

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
