"""Quality of a profile: which operators belong to a model, how exact their times are, and which fits are poor."""

from __future__ import annotations

from collections.abc import Sequence

from bitwright.profiling.cost_key import CostKey, TensorSpec
from bitwright.profiling.device_profile import CollectiveCost, DeviceProfile, Line, OperatorCost, TensorsCost
from bitwright.profiling.step_graph import StepGraph

__all__ = ["operators_of_step", "poor_fits", "relative_uncertainty"]

_LEAST_R2, _LARGEST_ERROR = 0.9, 0.3


def operators_of_step(profile: DeviceProfile, step: StepGraph) -> list[OperatorCost]:
    """Return the costs that belong to the operators of a step, in any format.

    A profile also has the operators of other models that were measured on the device.
    """
    calls = {CostKey.parse(call.key()).shapes_only() for call in (*(op.call for op in step.ops), step.loss)}
    tensors = {_without_gradient(tensor) for key in calls for tensor in key.tensors}
    found = []
    for cost in profile.operators:
        key = CostKey.parse(cost.operator).shapes_only()
        own = key in calls if key.is_call else all(_without_gradient(tensor) in tensors for tensor in key.tensors)
        if own:
            found.append(cost)
    return found


def _without_gradient(tensor: TensorSpec) -> TensorSpec:
    return tensor.with_(grad=False)


def relative_uncertainty(operators: Sequence[OperatorCost]) -> float:
    """Return half the width of the confidence intervals, relative to the time of all operators."""
    known = [c.forward for c in operators if c.forward.low is not None and c.forward.high is not None]
    whole = sum(timing.seconds for timing in known)
    return sum((t.high or 0.0) - (t.low or 0.0) for t in known) / 2 / whole if whole else 0.0


def poor_fits(profile: DeviceProfile) -> list[str]:
    """Describe the fitted lines that differ much from the measurements."""
    lines: list[tuple[str, Line | TensorsCost | CollectiveCost]] = [
        (f"{cost.kind} {direction}", line)
        for cost in profile.casts
        for direction, found in (("forward", cost.forward), ("backward", cost.backward))
        for line in found
    ]
    lines += [(tensors.name, tensors) for tensors in profile.tensors]
    lines += [(f"{cost.operation} of {cost.world}", cost) for cost in profile.collectives]
    return [
        f"{name} (R² {line.r2:.2f}, error at held-out sizes {100 * (line.held_out or 0):.0f} %)"
        for name, line in lines
        if line.r2 is not None and (line.r2 < _LEAST_R2 or (line.held_out or 0) > _LARGEST_ERROR)
    ]
