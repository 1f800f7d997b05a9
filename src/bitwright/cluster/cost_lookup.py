"""Look up costs in a profile: measured times first, fitted ones otherwise. Missing costs are collected and reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from logging import getLogger
from statistics import median

from bitwright.core.errors import BitwrightError, PlanError, Problem
from bitwright.core.registry import KERNELS
from bitwright.plan import ComputeSpec
from bitwright.profiling.cost_key import CallSpec, CostKey, TensorSpec
from bitwright.profiling.device_profile import DeviceProfile, OperatorCost, SavedTensors, at
from bitwright.profiling.execution import Cast
from bitwright.profiling.step_timer import ACCUMULATE
from bitwright.training.config import StepSettings

log = getLogger("bitwright")


@dataclass(frozen=True)
class Cost:
    """Seconds forward and backward."""

    forward: float
    backward: float = 0.0
    saved: SavedTensors | None = None


def kernel_estimate(call: CallSpec, spec: ComputeSpec | None) -> Cost | None:
    """Return the kernel's own estimate of an operator's cost, if it has one."""
    if spec is None or not spec.is_low_precision:
        return None
    shapes = {port: tensor.shape for port, tensor in call.ports}
    found: tuple[float, float] | None = KERNELS.get(spec.format).seconds(call.kind, shapes, spec)
    return None if found is None else Cost(*found)


@dataclass
class Costs:
    """Looks up costs in one profile and collects those that are missing."""

    profile: DeviceProfile
    missing: dict[tuple[str, str], str] = field(default_factory=dict)
    stood_in: set[tuple[str, str]] = field(default_factory=set)
    """Operators without a cost in their format. Their cost in float, or with other strides, is used instead."""

    @cached_property
    def _without_strides(self) -> dict[tuple[CostKey, str], OperatorCost]:
        """Costs by keys without strides."""
        return {
            (CostKey.parse(text).without_strides(), format): cost
            for (text, format), cost in self.profile.by_operator.items()
        }

    def __post_init__(self) -> None:
        """Use the median for gradient accumulations of unknown size."""
        known = [c.backward.seconds for c in self.profile.operators if c.format == ACCUMULATE and c.backward]
        self.typical_accumulation = median(known) if known else 0.0

    def fresh(self) -> Costs:
        """Return a copy for another plan, without the missing costs of this one."""
        other = copy(self)
        other.missing = {}
        return other

    def operator(self, text: str, format: str, name: str, estimate: Callable[[], Cost | None] = lambda: None) -> Cost:
        """Return the cost of an operator: measured in this format, else estimated by its kernel, else in float."""
        known = self.profile.by_operator.get((text, format))
        estimated = estimate() if known is None else None
        if estimated is not None:
            return estimated
        if known is None:
            base = format.partition("/")[0]
            known = self.profile.by_operator.get((text, base))
            if known is None:
                known = self._without_strides.get((CostKey.parse(text).without_strides(), base))
            if known is None:
                self.missing.setdefault((text, format), name)
                return Cost(0.0)
            self.stood_in.add((text, format))
        return _cost(known)

    def cast(self, cast: Cast, tensor: TensorSpec, name: str) -> Cost:
        """One cast of one tensor."""
        known = self.profile.by_operator.get((str(tensor), cast.kind))
        if known is not None:
            return _cost(known)
        fitted = self.profile.by_cast.get(cast.kind)
        forward = None if fitted is None else at(fitted.forward, tensor.elements)
        if fitted is None or forward is None:
            self.missing.setdefault((str(tensor), cast.kind), f"{name}:{cast.port}")
            return Cost(0.0)
        wanted = tensor.grad or cast.learns
        return Cost(
            forward, (at(fitted.backward, tensor.elements) or 0.0) if wanted else 0.0, SavedTensors(ports=["input"])
        )

    def accumulation(self, tensor: TensorSpec) -> float:
        """Seconds to accumulate a parameter's gradient."""
        known = self.profile.by_operator.get((str(tensor), ACCUMULATE))
        return known.backward.seconds if known is not None and known.backward else self.typical_accumulation

    def on_all(self, name: str, elements: int, tensors: int) -> float:
        """Seconds of work on all parameters, such as an optimizer step."""
        known = self.profile.by_name.get(name)
        if known is None:
            self.missing.setdefault((name, "all parameters"), name)
            return 0.0
        return known.seconds(elements, tensors)

    def scaling(self, elements: int, tensors: int) -> float:
        """Seconds of fp16 loss scaling; 0 if the profile doesn't contain it, like imported profiles."""
        known = self.profile.by_name.get("scaling")
        return known.seconds(elements, tensors) if known is not None else 0.0

    def optimizer(self, settings: StepSettings, elements: int, tensors: int) -> float:
        """One step of the optimizer."""
        return self.on_all(f"{settings.optimizer}/{'foreach' if settings.uses_foreach else 'loop'}", elements, tensors)

    def complain(self) -> None:
        """Raise an error that lists all missing costs."""
        if not self.missing:
            return
        problems = [
            Problem(
                what="not in the profile",
                where=name,
                value=f"{text} in {format}",
                fix=self._fix(text, format),
                code="not-profiled",
            )
            for (text, format), name in self.missing.items()
        ]
        shown = problems[:20]
        more = f", of which {len(shown)} are shown" if len(problems) > len(shown) else ""
        title = f"the profile of {self.profile.device} lacks {len(problems)} measurements{more}"
        raise PlanError(shown, title=title)

    def _fix(self, text: str, format: str) -> str:
        """Suggest how to get the missing cost, which depends on the source of the profile."""
        if self.profile.source == "published":
            fix = "bitwright profile WORKLOAD --published DEVICE with the same --batch, --precision, --kernel and --amp"
        elif self.profile.source == "imported":
            fix = "trace a step with the same batch, plan and autocast: bitwright profile WORKLOAD --trace FILE"
        else:
            fix = "measure it: bitwright profile WORKLOAD with the same batch, plan and --amp, and the same cache"
        other = self._batch_sizes.get((CostKey.parse(text).without_batch_size(), format))
        return fix if other is None else f"predict with --batch {other}, which the profile has; or {fix}"

    @cached_property
    def _batch_sizes(self) -> dict[tuple[CostKey, str], int]:
        """The measured batch size of each operator, by the rest of its key."""
        found: dict[tuple[CostKey, str], int] = {}
        for text, format in self.profile.by_operator:
            key = CostKey.parse(text)
            other = key.without_batch_size()
            if key.batch_size is not None and other is not key:
                found[other, format] = key.batch_size
        return found


def _cost(known: OperatorCost) -> Cost:
    return Cost(known.forward.seconds, known.backward.seconds if known.backward else 0.0, known.saved)


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
