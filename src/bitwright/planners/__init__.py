"""Planners: from a graph, a backend and a goal to a plan; from a cluster and penalties to precisions."""

from bitwright.planners.allocate import (
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
from bitwright.planners.batches import dynamic_batching, recover_and_split, split_batch
from bitwright.planners.by_backend import make_plan
from bitwright.planners.ilp import ilp
from bitwright.planners.machine import Additive, Machine, OperatorCost

__all__ = [
    "Additive",
    "Allocation",
    "Machine",
    "OperatorCost",
    "all_float",
    "allocation",
    "dynamic_batching",
    "equal_batches",
    "fastest",
    "ilp",
    "integer",
    "make_plan",
    "one_format",
    "recover",
    "recover_and_split",
    "split_batch",
    "uniform",
]
