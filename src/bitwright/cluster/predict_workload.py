"""`bitwright.predict`: predict a training step of a workload on one device or on a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from logging import getLogger
from pathlib import Path

from bitwright.cluster.cluster import Cluster
from bitwright.cluster.compare import StepComparison, compare
from bitwright.cluster.prediction import Prediction
from bitwright.cluster.predictor import Predictor
from bitwright.core.arguments import strict
from bitwright.core.errors import BitwrightError, PlanError
from bitwright.core.progress import Progress
from bitwright.plan import Plan
from bitwright.profiling.cost_key import CostKey
from bitwright.profiling.device_profile import DeviceProfile
from bitwright.profiling.step import StepSettings
from bitwright.profiling.step_graph import StepGraph, record_step
from bitwright.profiling.workload_step import first_half, make_variant, resolve_plan, training_batch
from bitwright.workload import Workload

__all__ = ["check_layout", "compare_with_steps", "explain_batch_mismatch", "predict", "uses_channels_last"]

log = getLogger("bitwright")


@strict
def predict(
    workload: Workload,
    target: DeviceProfile | Cluster,
    plan: Plan | str | Path | None = None,
    *,
    profiles: Mapping[str, DeviceProfile] | None = None,
    batch: int | None = None,
    channels_last: bool = False,
    settings: StepSettings | None = None,
    graph: StepGraph | None = None,
    exact: bool = False,
) -> Prediction:
    """Predict the time and the memory of one training step, without running it.

    `target` is the profile of one device, or a cluster. `profiles` gives the profiles of the cluster's device kinds;
    without it they are loaded from the files that the cluster names. `plan` is a precision name such as `int8`, a plan
    file or a `Plan`; without it the model trains in float. `graph` is a recorded step, which replaces recording one.
    `exact` simulates each device by itself; otherwise devices of one kind are simulated together.

    >>> import torch
    >>> from bitwright import Workload, predict, profile
    >>> x = torch.randn(16, 4)
    >>> workload = Workload(
    ...     name="tiny",
    ...     model=torch.nn.Linear(4, 2),
    ...     inputs=(x[:1],),
    ...     training=lambda: torch.utils.data.TensorDataset(x, x[:, :2]),
    ...     loss=torch.nn.functional.mse_loss,
    ... )
    >>> device = profile(workload, published="nvidia-t4", batch=8)
    >>> prediction = predict(workload, device, batch=8)
    >>> prediction.samples
    8
    """
    settings = settings or StepSettings()
    resolved = Plan() if plan is None else resolve_plan(workload, plan)
    channels_last = uses_channels_last(resolved, channels_last=channels_last)
    if isinstance(target, Cluster):
        known = dict(profiles) if profiles is not None else target.profiles()
    else:
        known = {"device": target}
    half = None
    if graph is None:
        check_layout(known, channels_last=channels_last)
        pair, loss = training_batch(workload, batch, channels_last=channels_last)
        graph = record_step(workload.model, pair, loss, name=workload.name)
        if any(device.batch is not None for device in resolved.devices.values()):
            half = record_step(workload.model, first_half(pair), loss, name=workload.name)
    with explain_batch_mismatch(known, graph.samples):
        if isinstance(target, Cluster):
            predictor = _predictor(workload, graph, half, resolved, known, target, settings)
        else:
            predictor = Predictor.make(graph, resolved, known, None, settings)
        return predictor.predict(exact=exact)


def _predictor(
    workload: Workload,
    graph: StepGraph,
    half: StepGraph | None,
    plan: Plan,
    profiles: Mapping[str, DeviceProfile],
    cluster: Cluster,
    settings: StepSettings,
) -> Predictor:
    plans = {
        name: resolve_plan(workload, cluster.folder / kind.plan)
        if kind.plan is not None
        else (plan.for_device(name) if name in plan.devices else plan)
        for name, kind in cluster.devices.items()
    }
    batches = {name: device.batch for name, device in plan.devices.items() if device.batch is not None}
    return Predictor.make(graph, plans, profiles, cluster, settings, batches=batches, smaller=half)


@strict
def compare_with_steps(
    workload: Workload,
    prediction: Prediction,
    plan: Plan | str | Path | None = None,
    *,
    steps: int = 30,
    batch: int | None = None,
    channels_last: bool = False,
    settings: StepSettings | None = None,
    progress: Progress | None = None,
) -> StepComparison:
    """Run real training steps on this device and compare them with a prediction for one device.

    The arguments are those of the prediction.
    """
    (local,) = prediction.locals.values()
    if local.profile.source == "imported":
        log.warning("the profile was imported: can't verify that the trace came from this device")
    resolved = Plan() if plan is None else resolve_plan(workload, plan)
    channels_last = uses_channels_last(resolved, channels_last=channels_last)
    pair, loss = training_batch(workload, batch, channels_last=channels_last)
    variant = make_variant(workload, resolved, pair, settings or StepSettings())
    return compare(
        local,
        variant,
        pair,
        loss,
        steps=steps,
        clock=local.profile.clock,
        progress=None if progress is None else lambda done: progress(done, steps, "running"),
    )


def uses_channels_last(plan: Plan, *, channels_last: bool = False) -> bool:
    """Return whether images are NHWC: the caller or a device of the plan asks for it."""
    return channels_last or any(device.channels_last for device in plan.devices.values())


def check_layout(profiles: Mapping[str, DeviceProfile], *, channels_last: bool) -> None:
    """Warn about profiles that were measured in the other memory layout: their times differ."""
    for kind, profile in profiles.items():
        ordered = [
            order
            for cost in profile.operators
            if (order := CostKey.parse(cost.operator).is_channels_last_conv) is not None
        ]
        if ordered and not channels_last and sum(ordered) * 2 > len(ordered):
            log.warning("the profile of %s was measured with channels-last: add --channels-last", kind)
        elif ordered and channels_last and not any(ordered):
            log.warning("the profile of %s was measured without --channels-last: its times may differ", kind)


@contextmanager
def explain_batch_mismatch(profiles: Mapping[str, DeviceProfile], batch: int) -> Iterator[None]:
    """Replace the error of a failed prediction if the profiles were measured with other batch sizes."""
    try:
        yield
    except PlanError as error:
        measured = {
            kind: {
                key.batch_size
                for cost in profile.operators
                if (key := CostKey.parse(cost.operator)).is_loss and key.batch_size is not None
            }
            for kind, profile in profiles.items()
        }
        other = {kind: max(sizes) for kind, sizes in measured.items() if sizes and batch not in sizes}
        if not other:
            raise
        found = ", ".join(f"{kind} with batch {size}" for kind, size in other.items())
        raise BitwrightError(
            f"the step has {batch} samples, but the profiles were measured with other batch sizes: {found}",
            where="--batch",
            value=batch,
            fix=f"use --batch {max(other.values())}, or profile with --batch {batch}",
            code="batch-not-profiled",
        ) from error
