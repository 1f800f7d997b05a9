"""What `profile` and `predict` begin with: a batch to train on, and models under plans."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bitwright.backends import make_plan
from bitwright.backends.precisions import resolve
from bitwright.cli.out import Out
from bitwright.cluster import MemoryLimit
from bitwright.core import tensor_tree as tree
from bitwright.core.errors import BitwrightError, PlanError
from bitwright.graph import capture
from bitwright.plan import Plan
from bitwright.profiling import DeviceProfile, StepSettings, Variant
from bitwright.profiling.step import Batch, Loss
from bitwright.quantizers import prepare
from bitwright.sensitivity import spec_of
from bitwright.training import Qat
from bitwright.training.data import TrainingData
from bitwright.training.distributed import Ranks
from bitwright.workload import Workload, loss_of

BatchOption = Annotated[
    int | None,
    typer.Option("--batch", min=1, help="Samples per step (default: the loader's, else 64).", show_default=False),
]
ClockOption = Annotated[
    str,
    typer.Option("--clock", help="wall, or cpu: what this one thread computes, whatever else the machine does."),
]
LayoutOption = Annotated[
    bool, typer.Option("--channels-last", help="Keep images as NHWC in memory, as `train --channels-last` does.")
]
PrecisionOption = Annotated[
    str | None,
    typer.Option(
        "--quantize", metavar="PRECISION", help="int8, w4a8, … or a plan.yaml, as in `train`.", show_default=False
    ),
]


def training_batch(workload: Workload, size: int | None, *, channels_last: bool = False) -> tuple[Batch, Loss]:
    """The first training batch, and the loss; the model is laid out as the batch is."""
    if workload.training is None or workload.loss is None:
        missing = "training" if workload.training is None else "loss"
        raise BitwrightError(
            f"a training step needs the workload's {missing}",
            where=f"workload {workload.name!r}",
            fix=f"give Workload({missing}=…)",
        )
    alone = Ranks(rank=0, world=1, local=0)
    data = TrainingData(workload, batch=size, seed=0, ranks=alone, workers=0)
    batch = next(data.epoch(0))
    if channels_last:
        workload.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        batch = tree.channels_last(batch)
    return batch, loss_of(workload)


_IMAGES = re.compile(r"conv2d\(input=\w+\[\d+,(\d+),(\d+),(\d+)\](@\d+,1,)?")


def tell_layout(out: Out, profiles: Mapping[str, DeviceProfile], *, channels_last: bool) -> None:
    """Costs of one layout stand in for those of the other: say so, they are other answers."""
    for kind, profile in profiles.items():
        found = [match for cost in profile.operators if (match := _IMAGES.match(cost.operator)) is not None]
        ordered = [bool(match[4]) for match in found if int(match[1]) > 1 and int(match[2]) * int(match[3]) > 1]
        if ordered and not channels_last and sum(ordered) * 2 > len(ordered):
            out.note(f"{kind} was profiled channels-last: add --channels-last")
        elif ordered and channels_last and not any(ordered):
            out.note(f"{kind} was profiled without --channels-last: its times for that layout are others")


_LOSS = re.compile(r"loss:\w+\(output=\w+\[(\d+)")


@contextmanager
def same_batch(profiles: Mapping[str, DeviceProfile], batch: int) -> Iterator[None]:
    """If a prediction fails on profiles of other batches, that is the one thing to say."""
    try:
        yield
    except PlanError as error:
        known = {
            kind: {int(match[1]) for cost in profile.operators if (match := _LOSS.match(cost.operator)) is not None}
            for kind, profile in profiles.items()
        }
        other = {kind: max(sizes) for kind, sizes in known.items() if sizes and batch not in sizes}
        if not other:
            raise
        said = ", ".join(f"{kind} of batch {size}" for kind, size in other.items())
        raise BitwrightError(
            f"the step has {batch} samples, but there are profiles of other batches: {said}",
            where="--batch",
            value=batch,
            fix=f"--batch {max(other.values())}, or profile with --batch {batch}",
        ) from error


def half_of(step: tuple[Batch, Loss]) -> tuple[Batch, Loss]:
    """The same with the first half of the batch."""
    batch, loss = step
    return tree.slice_batch(batch, 0, max(1, tree.batch_size(batch) // 2)), loss


def plan_of(workload: Workload, precision: str | Path) -> Plan:
    """The plan that a word or a file stands for, with its patterns resolved."""
    plan, target, choices, _ = resolve(str(precision), None, {})
    graph = capture(workload.model, workload.inputs)
    if plan is None:
        return make_plan(graph, target, model=workload.name, **choices)
    return plan.resolve(graph)


def kernels_of(workload: Workload, format: str) -> Plan:
    """Every operator in one kernel's precision: int8, int8/stochastic/weight, bf16."""
    graph = capture(workload.model, workload.inputs)
    return Plan(compute={"*": spec_of(format)}).resolve(graph)


def variant_of(workload: Workload, plan: Plan | None, batch: Batch, settings: StepSettings) -> Variant:
    """A copy of the model that is ready to train under this plan."""
    model = copy.deepcopy(workload.model)
    if plan is not None and any(spec.is_low_precision for spec in plan.compute.values()):
        prepare(model, plan, inputs=workload.inputs)
        return Variant(model=model, plan=plan, settings=settings)
    if plan is None or not any(True for _ in plan.quantized):
        return Variant(model=model, settings=settings)
    calibration: Any = [batch[0]]
    Qat(model, calibration, quantize=plan, example=workload.inputs, fuse=settings.fuse)
    return Variant(model=model, plan=plan, settings=settings)


def limits_in_words(limits: Mapping[str, MemoryLimit | None]) -> str:
    """What plans may use of each device's memory, and why it isn't all: devices with the same limit together."""
    alike: dict[str, list[str]] = {}
    for name, limit in limits.items():
        alike.setdefault("none known" if limit is None else str(limit), []).append(name)
    reserved = any(limit is not None and limit.reserve for limit in limits.values())
    why = "; predictions are some percent wrong (memory_reserve in cluster.yaml)" if reserved else ""
    return ", ".join(f"{' and '.join(names)} {text}" for text, names in alike.items()) + why
