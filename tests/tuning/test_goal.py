from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import raises_problem
from pydantic import ValidationError
from torch import nn

from bitwright.core.errors import PlanError
from bitwright.tuning import Budget, Drop, Goal
from bitwright.tuning.goal import read_bytes
from bitwright.workload import Workload

numbers = st.floats(min_value=-1e3, max_value=1e3, allow_nan=False)
positive = st.floats(min_value=0.1, max_value=1e3)
shares = st.floats(min_value=0, max_value=0.5)


@given(positive, positive, shares)
def test_relative_means_what_it_meant_in_lpot(reference: float, value: float, share: float) -> None:
    higher, lower = Goal(drop=Drop(relative=share)), Goal(drop=Drop(relative=share), lower_is_better=True)
    limit, ceiling = reference - reference * share, reference + reference * share
    assert (higher.margin("m", reference, value) >= 0) == (value >= limit)
    assert (lower.margin("m", reference, value) >= 0) == (value <= ceiling)


@given(numbers, numbers, shares)
def test_absolute_is_in_units_of_the_metric(reference: float, value: float, room: float) -> None:
    assert (Goal(drop=room).margin("m", reference, value) >= 0) == (value >= reference - room)
    assert (Goal(drop=room, lower_is_better=("m",)).margin("m", reference, value) >= 0) == (value <= reference + room)


@given(numbers, shares)
def test_the_float_model_itself_always_passes(reference: float, share: float) -> None:
    for lower in (False, True):
        assert Goal(drop=Drop(relative=share), lower_is_better=lower).margin("m", reference, reference) >= 0


def test_nan_never_passes() -> None:
    assert Goal(drop="50%", lower_is_better=True).margin("m", 1.0, math.nan) == -math.inf


def test_several_metrics_the_worst_counts() -> None:
    goal = Goal(drop={"top1": "1%", "f1": 0.5})
    reference = {"top1": 90.0, "f1": 80.0}
    assert goal.worst_margin("top1", reference, {"top1": 90.0, "f1": 79.6}) == pytest.approx(0.1 / 80)
    assert goal.worst_margin("top1", reference, {"top1": 88.0, "f1": 80.0}) < 0


@pytest.mark.parametrize(("text", "size"), [("2 MB", 2_000_000), ("1.5MiB", 1_572_864), (4096, 4096), ("10kb", 10_000)])
def test_sizes_are_readable(text: object, size: int) -> None:
    assert read_bytes(text) == size
    assert Goal(size=text).size == size  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [{"drop": "much"}, {"drop": {"relative": 0.1, "absolute": 1}}, {"size": "2 apples"}, {"speed": 3}, {"drop": -1}],
)
def test_wrong_goals_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Goal.model_validate(wrong)


def test_a_budget_is_positive() -> None:
    with raises_problem("invalid-value", where="minutes"):
        Budget(minutes=0)


def test_a_drop_of_more_than_everything_is_refused() -> None:
    workload = Workload(name="w", model=nn.Linear(2, 2), inputs=(torch.ones(1, 2),))
    for drop in ("101%", {"top1": "1%", "top5": "150%"}):
        with pytest.raises(PlanError) as caught:
            Goal(drop=drop).directed(workload)  # type: ignore[arg-type]
        assert caught.value.codes == ["impossible-drop"]
    assert str(Goal(drop="100%").directed(workload).drop) == "100%"  # type: ignore[arg-type]
    loss = Goal(drop="150%", lower_is_better=True).directed(workload)  # type: ignore[arg-type]
    assert loss.required("loss", 2.0) == 5.0
