"""Run real steps of a workload on this device: `bitwright.profile` measures them, and `compare_with_steps` compares a
prediction with them.

`profile` is in this package because it predicts the memory of a step, to find out how much of the measured memory
belongs to the process itself.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from logging import getLogger
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bitwright.cluster.device_step import DeviceStep
from bitwright.cluster.prediction import Prediction
from bitwright.cluster.predictor import predict_step, uses_channels_last
from bitwright.core.arguments import strict
from bitwright.core.display import Progress, Summarized, Table
from bitwright.core.errors import PlanError, Problem
from bitwright.core.formatting import relative_error
from bitwright.core.interrupts import Interrupted
from bitwright.plan import Plan
from bitwright.profiling.cost_key import CostKey, is_loss
from bitwright.profiling.device_profile import DeviceProfile
from bitwright.profiling.execution import is_quantizer
from bitwright.profiling.profiled_step import (
    CLOCKS,
    PHASES,
    Clock,
    TimedStep,
    Variant,
    WorkloadStep,
    halves,
    kernel_plan,
    resolve_plan,
)
from bitwright.profiling.profiler import (
    check_device,
    device_name,
    of_rank,
    open_store,
    profile_variants,
    samples_file,
    training_peak,
)
from bitwright.profiling.published_profile import published as published_profile
from bitwright.profiling.sample_store import SampleStore
from bitwright.profiling.step_graph import StepGraph
from bitwright.profiling.step_timer import (
    ACCUMULATE,
    Sample,
    StepTimer,
    TimerOverhead,
    gc_disabled,
    timer_overhead,
    yardstick,
)
from bitwright.training.config import Amp, StepSettings
from bitwright.training.step import Batch
from bitwright.workload import Loss, Workload

__all__ = ["StepComparison", "TimePair", "check_is_here", "compare", "compare_with_steps", "profile"]

log = getLogger("bitwright")
_WARM = 3


@strict
def profile(
    workload: Workload,
    *,
    plans: Sequence[Plan | str | Path] = (),
    kernels: Sequence[str] = (),
    amp: Sequence[Amp] = (),
    batch: int | None = None,
    half_batch: bool = False,
    channels_last: bool = False,
    rounds: int = 30,
    clock: Clock = "wall",
    fit_casts: bool = True,
    cache: str | Path | None = None,
    published: str | None = None,
    progress: Progress | None = None,
) -> DeviceProfile:
    """Measure operators, casts, optimizers and the host within real training steps of a workload.

    The float model is always measured. `plans` adds quantized training: precision names such as `int8`, plan files or
    `Plan` objects. `kernels` adds low-precision kernels such as `int8` or `int8/stochastic/weight`. `amp` measures all
    of them under autocast as well. `half_batch` also measures half of the batch, which planners need to choose batch
    sizes.

    Measurements are stored in `cache` (default: a file of this device in the user's cache folder) and reused, also for
    other models. After an interruption, call the function again to resume. In a process group, all ranks call this
    function; it then measures collectives as well.

    `published` derives the times from the data sheet of a device (`nvidia-t4`, …) instead of measuring.

    >>> from bitwright import load_workload, profile
    >>> workload = load_workload("digits-untrained")
    >>> profile(workload, published="nvidia-t4", batch=8)
    DeviceProfile('NVIDIA T4 (published, not measured)', published, 23 operators)
    """
    _check_names(clock, amp)
    step = WorkloadStep.of(workload, batch, channels_last=channels_last)
    peak = 0
    if published is None:
        check_device(workload.model)
        peak = training_peak(
            workload.model, step.batch, step.loss
        )  # first, because later measurements leave memory allocated
    recorded = step.record()
    found: list[Plan | None] = [None, *(resolve_plan(workload, plan) for plan in plans)]
    found += [kernel_plan(workload, format) for format in kernels]
    found += [half for plan in found if plan is not None for half in halves(plan)]
    types: list[Amp | None] = [None, *amp]
    variants = [step.variant(plan, StepSettings(amp=kind)) for plan in found for kind in types]
    batches = [step.half, step.batch] if half_batch else [step.batch]  # the profile describes the last one
    if published is not None:
        return published_profile(published, variants, batches, step.loss)
    file = Path(cache) if cache is not None else samples_file(clock)
    store = open_store(of_rank(file, _rank()), clock)
    with _report_saved_rounds(store):
        for own in batches:
            made = profile_variants(
                variants,
                own,
                step.loss,
                store=store,
                clock=clock,
                rounds=rounds,
                fit_casts=fit_casts,
                progress=None if progress is None else lambda words, done, total: progress(done, total, words),
            )
    return _with_process_memory(made, recorded, peak)


def _check_names(clock: str, amp: Sequence[str]) -> None:
    problems = []
    if clock not in CLOCKS:
        fix = "use wall or cpu"
        problems.append(Problem(what="unknown clock", where="clock", value=clock, fix=fix, code="unknown-clock"))
    problems += [
        Problem(what="unknown autocast type", where="amp", value=name, fix="use bf16 or fp16", code="unknown-amp-type")
        for name in amp
        if name not in ("bf16", "fp16")
    ]
    if problems:
        raise PlanError(problems, title="unknown options")


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


@contextmanager
def _report_saved_rounds(store: SampleStore) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as error:
        saved = f"no profile was written; {len(store.totals)} rounds are saved in {store.path}"
        raise Interrupted(str(error) or "interrupted", f"{saved}; rerun the command to resume") from None


def _with_process_memory(profile: DeviceProfile, recorded: StepGraph, peak: int) -> DeviceProfile:
    """Set the memory of a training process that its tensors do not explain: the peak minus the predicted tensors."""
    memory = predict_step(recorded, Plan(), profile).devices[0].memory
    if not peak or memory is None:
        return profile
    facts = profile.memory.model_copy(update={"process": max(0, peak - memory.peak)})
    return profile.model_copy(update={"memory": facts})


# -- comparison with a prediction -----------------------------------------------------------------------------


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
    step = WorkloadStep.of(workload, batch, channels_last=channels_last)
    return compare(
        local,
        step.variant(resolved, settings or StepSettings()),
        step.batch,
        step.loss,
        steps=steps,
        clock=local.profile.clock,
        progress=None if progress is None else lambda done: progress(done, steps, "running"),
    )


@dataclass(frozen=True, kw_only=True)
class TimePair:
    """Predicted and measured seconds of a step, a phase or a group of operators."""

    name: str
    predicted: float
    measured: float

    @property
    def error(self) -> float | None:
        """The relative error; None if nothing was measured."""
        return self.predicted / self.measured - 1 if self.measured > 0 else None


@dataclass(frozen=True, kw_only=True)
class StepComparison(Summarized):
    """A prediction next to medians of real steps."""

    step: TimePair
    phases: tuple[TimePair, ...]
    groups: tuple[TimePair, ...]
    """Operators by kind and casts by result, forward and backward together."""
    steps: int
    drift: float | None
    """The time of the reference workload now, relative to the time when the device was profiled."""

    @property
    def error_without_drift(self) -> float | None:
        """The error of the step if the machine were as fast as when it was profiled."""
        if self.drift is None or not self.step.measured:
            return None
        return self.step.predicted * self.drift / self.step.measured - 1

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain data."""
        return asdict(self)

    def summary(self) -> Iterator[Table | str]:
        """Predicted and measured times of the step, its phases and its operators."""
        if self.drift is not None and self.error_without_drift is not None:
            error = f"{100 * self.error_without_drift:+.1f} %"
            then = f"{self.drift:.2f} times as long as when it was profiled"
            yield f"this machine now takes {then}; error without that: {error}"
        pairs = [self.step, *self.phases, *self.groups]
        yield Table(
            [f"median of {self.steps} steps", "#predicted", "#measured", "#error"],
            [
                (
                    pair.name,
                    f"{1e3 * pair.predicted:.3f} ms",
                    f"{1e3 * pair.measured:.3f} ms",
                    relative_error(pair.predicted, pair.measured),
                )
                for pair in pairs
                if max(pair.predicted, pair.measured) > 0
            ],
        )


def compare(
    local: DeviceStep,
    variant: Variant,
    batch: Batch,
    loss: Loss,
    *,
    steps: int = 30,
    clock: Clock = "wall",
    progress: Callable[[int], None] | None = None,
) -> StepComparison:
    """Run real steps and compare them with the prediction."""
    check_is_here(local.profile)
    variant.model.train()
    step = TimedStep(variant.model, [batch], loss, variant.settings, clock=clock)
    timer = StepTimer(variant.model, variant.plan, variant.settings, CLOCKS[clock], host=local.profile.host)
    for _ in range(_WARM):
        step()
    plain: list[dict[str, float]] = []
    seen: list[dict[str, float]] = []
    speeds: list[float] = []
    with gc_disabled():
        for number in range(steps):
            speeds.append(yardstick(CLOCKS[clock]))
            plain.append(step.settled())  # the reference workload and the timer have changed the caches
            sample = timer.run(step)
            seen.append(_groups(sample, timer_overhead(timer, sample, plain[-1])))
            if progress is not None:
                progress(number + 1)
    predicted = predicted_groups(local)
    names = sorted({*predicted, *seen[0]} - _inside_others(local), key=lambda name: -predicted.get(name, 0.0))
    return StepComparison(
        step=TimePair(
            name="step",
            predicted=local.seconds,
            measured=statistics.median(sum(spent.values()) for spent in plain),
        ),
        phases=tuple(
            TimePair(
                name=name, predicted=local.phases[name], measured=statistics.median(spent[name] for spent in plain)
            )
            for name in PHASES
            if name != "clip" or variant.settings.clip is not None
        ),
        groups=tuple(
            TimePair(
                name=name,
                predicted=predicted.get(name, 0.0),
                measured=statistics.median(spent.get(name, 0.0) for spent in seen),
            )
            for name in names
        ),
        steps=steps,
        drift=statistics.median(speeds) / then if (then := local.profile.host.yardstick) else None,
    )


def check_is_here(profile: DeviceProfile) -> None:
    """Raise if the profile is of another device or of another number of threads.

    Imported profiles have neither a device name nor a number of threads, so they are accepted.
    """
    fix = "profile this device as it is now: bitwright profile"
    threads = torch.get_num_threads()
    problems = []
    if profile.source == "published":
        problems.append(
            Problem(
                what="it was published, not measured here", where="source", fix=fix, code="profile-not-of-this-device"
            )
        )
    if profile.source == "measured" and _without_threads(profile.device) != _without_threads(device_name()):
        what = f"this one is {device_name()}"
        problems.append(
            Problem(what=what, where="device", value=profile.device, fix=fix, code="profile-not-of-this-device")
        )
    if profile.source == "measured" and profile.threads != threads:
        words = f"set OMP_NUM_THREADS={profile.threads}, or profile with {threads}"
        problems.append(
            Problem(
                what=f"now there are {threads}",
                where="threads",
                value=profile.threads,
                fix=words,
                code="thread-count-differs",
            )
        )
    if profile.clock == "cpu" and threads > 1:
        words = "set OMP_NUM_THREADS=1, or profile with --clock wall"
        problems.append(
            Problem(
                what="it counts one thread only",
                where="clock",
                value=profile.clock,
                fix=words,
                code="clock-needs-one-thread",
            )
        )
    if problems:
        raise PlanError(problems, title=f"the profile of {profile.device} can't be compared with steps here")


def _without_threads(device: str) -> str:
    return re.sub(r", \d+ threads?$", "", device)


def _inside_others(local: DeviceStep) -> set[str]:
    """Kinds of operators whose calls all run within a quantizer."""
    within: dict[str, bool] = {}
    for block in local.blocks:
        kind = block.op.call.kind
        within[kind] = within.get(kind, True) and block.execution.format == "within-cast"
    return {kind for kind, all_ in within.items() if all_}


def _group(text: str, format: str) -> str:
    if format == ACCUMULATE:
        return "taking gradients"
    key = CostKey.parse(text)
    if not key.is_call:
        return "quantizers" if is_quantizer(format) else "casts"
    return key.kind


def _groups(sample: Sample, overhead: TimerOverhead) -> dict[str, float]:
    """The times of a step by group, without the overhead of the timer."""
    found: dict[str, float] = defaultdict(float)
    for key, seconds in sample.forward.items():
        over = overhead.loss if is_loss(key[0]) else overhead.forward
        found[_group(*key)] += seconds - sample.calls[key] * over
    for key, seconds in sample.backward.items():
        found[_group(*key)] += seconds - sample.calls[key] * overhead.backward
    return dict(found)


def predicted_groups(local: DeviceStep) -> dict[str, float]:
    """The prediction's operators and casts by group, for one step."""
    found: dict[str, float] = defaultdict(float)
    count = local.settings.accumulate
    for block in local.blocks:
        found[block.op.call.kind] += count * (block.cost.forward + block.cost.backward)
        for placed in block.casts:
            cast = placed.cost.forward + placed.cost.backward
            found["quantizers" if is_quantizer(placed.cast.kind) else "casts"] += count * cast
        found["taking gradients"] += count * block.accumulation
    found["loss"] += count * (local.loss.forward + local.loss.backward)
    return dict(found)
