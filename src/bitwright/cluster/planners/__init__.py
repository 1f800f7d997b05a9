"""Planners that choose precisions and batch sizes for a cluster."""

from bitwright.cluster.planners.batches import dynamic_batching, recover_and_split, split_batch
from bitwright.cluster.planners.ilp import ilp
from bitwright.cluster.planners.precision import (
    Allocation,
    all_float,
    allocation,
    equal_batches,
    fastest,
    integer,
    one_format,
    recover,
    uniform,
)

__all__ = [
    "Allocation",
    "all_float",
    "allocation",
    "dynamic_batching",
    "equal_batches",
    "fastest",
    "ilp",
    "integer",
    "one_format",
    "recover",
    "recover_and_split",
    "split_batch",
    "uniform",
]
