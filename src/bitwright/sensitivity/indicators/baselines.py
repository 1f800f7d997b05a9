"""Baselines for other indicators: random numbers, and how much rounding changes the variance of a weight."""

from __future__ import annotations

from random import Random

from bitwright.plan import ComputeSpec
from bitwright.sensitivity.error_injection import rounded_weight, weight_of
from bitwright.sensitivity.operator_scores import Subject, Values


def random(subject: Subject) -> Values:
    """A number between 0 and 1 that depends only on the seed, the operator and the format."""
    return subject.each(lambda name, spec: Random(f"{subject.seed} {name} {spec}").random())


def weight_variance(subject: Subject) -> Values:
    """|var(Ŵ) − var(W)|; 0 for operators without a weight. Uses no data."""

    def change(name: str, spec: ComputeSpec) -> float:
        weight = weight_of(subject.model, subject.op(name))
        if weight is None:
            return 0.0
        rounded = rounded_weight(weight, subject.op(name).kind, spec)
        return abs(float(rounded.double().var(correction=0) - weight.double().var(correction=0)))

    return subject.each(change)
