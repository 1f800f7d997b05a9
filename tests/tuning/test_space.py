from __future__ import annotations

import random
from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bitwright import PlanError, Space, capture, make_plan
from bitwright.backends import backend
from bitwright.tuning import Candidate, Override, SearchSpace
from bitwright.tuning.space import Base, Operator, make_space

MODEL = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 4)).eval()
GRAPH = capture(MODEL, torch.randn(1, 3, 8, 8))


def made(**options: object) -> SearchSpace:
    table = backend("onnxruntime")
    plan = make_plan(GRAPH, "onnxruntime")
    return make_space(Space.model_validate(options), GRAPH, table, plan, {})


def test_the_space_comes_from_the_graph_and_the_table() -> None:
    space = made()
    assert [op.name for op in space.operators] == ["0", "2", "4"]
    assert all(op.options == (None, "float") for op in space.operators)
    assert "int8/tensor/sym" in space.axes["weights"]
    assert space.size == 8 * len(list(space.bases()))


def test_rules_by_name_count_before_rules_by_type() -> None:
    space = made(types={"conv2d": {"keep": "float"}}, operators={"2": {"keep": "quantized", "observer": ["mse", "kl"]}})
    options = {op.name: op.options for op in space.operators}
    assert options["0"] == ("float",)
    assert options["2"] == (Override(observer="mse"), Override(observer="kl"))
    assert options["4"] == (None, "float")
    assert space.start().float == {"0"}


def test_names_may_be_regular_expressions_and_the_first_may_stay_float() -> None:
    assert [op.options for op in made(operators={"re:[24]": {"keep": "float"}}).operators] == [
        (None, "float"),
        ("float",),
        ("float",),
    ]
    assert made(first="float").start().float == {"0"}


def test_all_problems_are_listed_at_once() -> None:
    with pytest.raises(PlanError) as caught:
        made(
            operators={"nine": {"keep": "float"}},
            types={"conv9d": {"observer": ["mse"]}},
            weights=["int8/tensor/asym"],
            observer=["minmux"],
            steps=[["equalise"]],
        )
    text = str(caught.value)
    for word in ("space.operators.nine", "space.types.conv9d", "int8/tensor/asym", "'minmax'", "equalise"):
        assert word in text


def test_an_override_reaches_the_plan() -> None:
    own = Override(weights="int8/tensor/sym", observer="mse")
    plan = Candidate(overrides={"2": own}).plan(GRAPH, "onnxruntime", model=None, choices={})
    assert str(plan.sites["2:weight"].format) == "int8/tensor/sym"
    assert str(plan.sites["0:weight"].format) == "int8/channel/sym"
    assert {site: spec.observer for site, spec in plan.sites.items() if site.startswith("2:") and spec.share is None}[
        "2:output"
    ] == "mse"


@st.composite
def spaces(draw: st.DrawFn) -> SearchSpace:
    names = [f"op{i}" for i in range(draw(st.integers(1, 4)))]
    options = [(None, "float"), ("float",), (None,), (None, Override(observer="mse"), "float")]
    ops = [Operator(name=n, kind="linear", macs=1, options=draw(st.sampled_from(options))) for n in names]
    axes = {"weights": (None, "int8/tensor/sym")[: draw(st.integers(1, 2))], "observer": ("minmax", "mse", "kl")}
    return SearchSpace(axes=axes, operators=tuple(ops))


@given(spaces())
@settings(max_examples=30)
def test_everything_is_each_candidate_once_and_the_start_comes_first(space: SearchSpace) -> None:
    everything = list(space.everything())
    assert len(everything) == space.size == len({candidate.key for candidate in everything})
    assert everything[0] == space.start()


@given(spaces(), st.integers(0, 100))
@settings(max_examples=30)
def test_candidates_come_back_from_json(space: SearchSpace, seed: int) -> None:
    candidate = space.random(random.Random(seed))
    assert Candidate.from_json(candidate.to_json()) == candidate
    assert candidate.key in {other.key for other in space.everything()}


def test_a_huge_space_is_never_written_down() -> None:
    ops = tuple(Operator(name=f"op{i}", kind="linear", macs=1, options=(None, "float")) for i in range(200))
    space = SearchSpace(axes={"observer": ("minmax",)}, operators=ops)
    assert space.size == 2**200
    assert [len(c.float) for c in islice(space.everything(), 202)] == [0] + [1] * 200 + [2]


def test_bases_change_one_thing_before_two() -> None:
    space = SearchSpace(axes={"weights": ("a", "b"), "observer": ("x", "y")}, operators=())
    assert [(b.weights, b.observer) for b in space.bases()] == [("a", "x"), ("a", "y"), ("b", "x"), ("b", "y")]
    assert Base(observer="mse").choices() == {"observer": "mse"}
