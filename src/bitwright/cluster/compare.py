"""Compare a prediction with real steps of the same plan, which run with and without the timer in turn."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bitwright.cluster.device_step import DeviceStep
from bitwright.core.errors import PlanError, Problem
from bitwright.profiling.cost_key import CostKey, is_loss
from bitwright.profiling.device_profile import DeviceProfile
from bitwright.profiling.execution import is_quantizer
from bitwright.profiling.machine import device_name
from bitwright.profiling.profiler import Variant
from bitwright.profiling.step import CLOCKS, PHASES, Batch, Clock
from bitwright.profiling.step_timer import ACCUMULATE, Sample, StepTimer, TimedStep
from bitwright.profiling.timing import TimerOverhead, gc_disabled, timer_overhead, yardstick
from bitwright.workload import Loss

_WARM = 3


@dataclass(frozen=True, kw_only=True)
class TimePair:
    """Predicted and measured seconds of a step, a phase or a group of operators."""

    name: str
    predicted: float
    measured: float

    @property
    def error(self) -> float | None:
        """Relative; None where nothing was measured."""
        return self.predicted / self.measured - 1 if self.measured > 0 else None


@dataclass(frozen=True, kw_only=True)
class StepComparison:
    """Medians of so many steps."""

    step: TimePair
    phases: tuple[TimePair, ...]
    groups: tuple[TimePair, ...]
    """Operators by kind, casts by what they make, forward and backward together."""
    steps: int
    drift: float | None
    """How much longer a fixed piece of work takes now than when the device was profiled."""

    @property
    def error_without_drift(self) -> float | None:
        """What the step's error would be on a machine that is as fast as it was."""
        if self.drift is None or not self.step.measured:
            return None
        return self.step.predicted * self.drift / self.step.measured - 1


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
            plain.append(step.settled())  # the yardstick and the watch have left other things in the caches
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
        problems.append(Problem(what="it was published, not measured here", where="source", fix=fix))
    if profile.source == "measured" and _without_threads(profile.device) != _without_threads(device_name()):
        what = f"this one is {device_name()}"
        problems.append(Problem(what=what, where="device", value=profile.device, fix=fix))
    if profile.source == "measured" and profile.threads != threads:
        words = f"set OMP_NUM_THREADS={profile.threads}, or profile with {threads}"
        problems.append(Problem(what=f"now there are {threads}", where="threads", value=profile.threads, fix=words))
    if profile.clock == "cpu" and threads > 1:
        words = "set OMP_NUM_THREADS=1, or profile with --clock wall"
        problems.append(Problem(what="it counts one thread only", where="clock", value=profile.clock, fix=words))
    if problems:
        raise PlanError(problems, title=f"the profile of {profile.device} can't be compared with steps here")


def _without_threads(device: str) -> str:
    return re.sub(r", \d+ threads?$", "", device)


def _inside_others(local: DeviceStep) -> set[str]:
    """Kinds that aren't in the step: each call of them is done within a quantizer."""
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
    """Without what watching adds, as the profile has it."""
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
