from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitwright.tuning.goal import cannot_pass, mcnemar, required_hits


@given(st.integers(1, 5000), st.floats(0, 100))
def test_required_hits_are_the_fewest(samples: int, percent: float) -> None:
    hits = required_hits(percent, samples)
    assert 100.0 * hits / samples >= percent
    assert hits == 0 or 100.0 * (hits - 1) / samples < percent


def test_a_model_that_passes_is_hardly_ever_given_up() -> None:
    """1,000 random parts of a model that just passes: at most one in a hundred is given up at an error of 1 %."""
    samples, required, part = 2000, 1800, 200
    right = [1] * required + [0] * (samples - required)
    generator = random.Random(0)
    stopped = sum(cannot_pass(sum(generator.sample(right, part)), part, samples, required, 0.01) for _ in range(1000))
    assert stopped <= 10 + 3 * math.sqrt(10)  # three standard deviations of chance


@given(st.integers(20, 60), st.data())
def test_the_bound_is_the_hypergeometric_tail(samples: int, data: st.DataObject) -> None:
    required = data.draw(st.integers(1, samples))
    part = data.draw(st.integers(1, samples))
    hits = data.draw(st.integers(max(0, part - (samples - required)), min(part, required)))
    tail = sum(
        math.comb(required, h) * math.comb(samples - required, part - h)
        for h in range(hits + 1)
        if 0 <= part - h <= samples - required
    ) / math.comb(samples, part)
    assert cannot_pass(hits, part, samples, required, tail * 1.0001)
    assert not cannot_pass(hits, part, samples, required, tail * 0.9999)


def test_what_can_never_pass_is_hopeless_at_once() -> None:
    assert cannot_pass(10, 10, 100, 101)
    assert not cannot_pass(0, 10, 100, 0)


@given(st.integers(0, 40), st.integers(0, 40))
def test_mcnemar_is_the_two_sided_binomial_test(b: int, c: int) -> None:
    n = b + c
    weights = [math.comb(n, k) for k in range(n + 1)]
    expected = sum(w for w in weights if w <= weights[b] * (1 + 1e-9)) / 2**n
    assert mcnemar(b, c).p_value == pytest.approx(min(1.0, expected))
