"""hessian: the mean curvature of the loss by an operator's weight, times the squared error of the weight."""

from __future__ import annotations

from bitwright.plan import ComputeSpec
from bitwright.sensitivity.hessian import hessian_traces
from bitwright.sensitivity.indicate import Subject, Values
from bitwright.sensitivity.weights import rounded_weight, weight_name, weight_of


def hessian(subject: Subject) -> Values:
    """(trace(H)/n)·‖ΔW‖², twice what an error in any direction adds to the loss; 0 for operators without a weight."""
    names = {name: weight_name(subject.op(name)) for name in subject.cases}
    wanted = dict.fromkeys(name for name in names.values() if name is not None)
    traces = hessian_traces(subject.model, subject.batches, subject.loss, wanted, seed=subject.seed) if wanted else {}

    def added(name: str, spec: ComputeSpec) -> float:
        weight, parameter = weight_of(subject.model, subject.op(name)), names[name]
        if weight is None or parameter is None:
            return 0.0
        error = float((rounded_weight(weight, subject.op(name).kind, spec) - weight).square().sum())
        return max(traces[parameter], 0.0) / weight.numel() * error

    return subject.each(added)
