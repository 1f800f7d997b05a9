"""random: what any other indicator must be better than."""

from __future__ import annotations

from random import Random

from bitwright.sensitivity.indicate import Subject, Values


def random(subject: Subject) -> Values:
    """A number between 0 and 1, always the same for a seed, an operator and a format."""
    return subject.each(lambda name, spec: Random(f"{subject.seed} {name} {spec}").random())
