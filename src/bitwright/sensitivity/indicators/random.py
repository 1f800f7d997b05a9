"""random: a baseline that every other indicator must beat."""

from __future__ import annotations

from random import Random

from bitwright.sensitivity.operator_scores import Subject, Values


def random(subject: Subject) -> Values:
    """A number between 0 and 1 that depends only on the seed, the operator and the format."""
    return subject.each(lambda name, spec: Random(f"{subject.seed} {name} {spec}").random())
