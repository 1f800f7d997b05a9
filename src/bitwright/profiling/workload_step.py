"""The training step of a workload: its batch, its recorded graph, and copies of its model that follow a plan."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from bitwright.backends import make_plan
from bitwright.backends.precisions import resolve
from bitwright.core import tensor_tree as tree
from bitwright.core.arguments import strict
from bitwright.core.errors import BitwrightError
from bitwright.graph import capture
from bitwright.plan import Plan
from bitwright.profiling.profiler import Variant
from bitwright.profiling.step import Batch, StepSettings
from bitwright.profiling.step_graph import StepGraph, record_step
from bitwright.quantizers import prepare
from bitwright.sensitivity import spec_of
from bitwright.training import Qat
from bitwright.training.data import TrainingData
from bitwright.training.distributed import Ranks
from bitwright.workload import Loss, Workload, loss_of

__all__ = [
    "first_half",
    "kernel_plan",
    "make_variant",
    "record_workload_step",
    "resolve_plan",
    "training_batch",
]


def training_batch(workload: Workload, size: int | None = None, *, channels_last: bool = False) -> tuple[Batch, Loss]:
    """Return the first training batch and the loss. With `channels_last`, convert the model and the batch to NHWC."""
    if workload.training is None or workload.loss is None:
        missing = "training" if workload.training is None else "loss"
        raise BitwrightError(
            f"a training step needs the workload's {missing}",
            where=f"workload {workload.name!r}",
            fix=f"pass Workload({missing}=…)",
            code="workload-field-missing",
        )
    data = TrainingData(workload, batch=size, seed=0, ranks=Ranks(rank=0, world=1, local=0), workers=0)
    batch = next(data.epoch(0))
    if channels_last:
        workload.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        batch = tree.channels_last(batch)
    return batch, loss_of(workload)


def first_half(batch: Batch) -> Batch:
    """Return the first half of a batch, at least one sample."""
    half: Batch = tree.slice_batch(batch, 0, max(1, tree.batch_size(batch) // 2))
    return half


@strict
def record_workload_step(workload: Workload, *, batch: int | None = None, channels_last: bool = False) -> StepGraph:
    """Record one training step of a workload's float model. The model is left unchanged.

    `batch` is the number of samples; the default is the batch size of the workload's loader, or 64.
    """
    pair, loss = training_batch(workload, batch, channels_last=channels_last)
    return record_step(workload.model, pair, loss, name=workload.name)


def resolve_plan(workload: Workload, plan: Plan | str | Path) -> Plan:
    """Return the plan for a precision name (`int8`, `w4a8`), a plan file or a `Plan`, with its patterns resolved."""
    precision = plan if isinstance(plan, Plan) else str(plan)
    found, target, choices, _ = resolve(precision, None, {})
    graph = capture(workload.model, workload.inputs)
    if found is None:
        return make_plan(graph, target, model=workload.name, **choices)
    return found.resolve(graph)


def kernel_plan(workload: Workload, format: str) -> Plan:
    """Return a plan that runs every operator with one kernel: `int8`, `int8/stochastic/weight`, `bf16`."""
    graph = capture(workload.model, workload.inputs)
    return Plan(compute={"*": spec_of(format)}).resolve(graph)


def make_variant(workload: Workload, plan: Plan | None, batch: Batch, settings: StepSettings) -> Variant:
    """Return a copy of the model that is prepared and calibrated for training under a plan."""
    model = copy.deepcopy(workload.model)
    if plan is not None and any(spec.is_low_precision for spec in plan.compute.values()):
        prepare(model, plan, inputs=workload.inputs)
        return Variant(model=model, plan=plan, settings=settings)
    if plan is None or not any(True for _ in plan.quantized):
        return Variant(model=model, settings=settings)
    calibration: Any = [batch[0]]
    Qat(model, calibration, quantize=plan, example=workload.inputs, fuse=settings.fuse)
    return Variant(model=model, plan=plan, settings=settings)
