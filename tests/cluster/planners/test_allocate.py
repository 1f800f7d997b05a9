"""Planners of precisions against brute force."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import raises_problem

from bitwright import PlanError
from bitwright.cluster.cost_model import FLOAT, Assignment, TableCost, TableCostModel, total_penalty
from bitwright.cluster.planners import (
    Allocation,
    dynamic_batching,
    fastest,
    ilp,
    integer,
    recover,
    recover_and_split,
    split_batch,
    uniform,
)

MB = 10**6


def cost_model(
    speeds: dict[str, float], operators: int = 6, *, seed: int = 0, gain: float = 0.6, count: int = 1
) -> TableCostModel:
    """Kinds with these speeds; int8 takes `gain` of float's time and a quarter of its bytes, mostly."""
    import random

    draw = random.Random(seed)
    names = [f"op{i}" for i in range(operators)]
    float_seconds = {name: draw.uniform(0.5, 3.0) for name in names}
    ratio = {name: draw.uniform(gain - 0.1, 1.15) for name in names}
    size = {name: draw.randint(1, 9) * 4 * MB for name in names}
    costs = {
        kind: {
            name: {
                FLOAT: TableCost(seconds=float_seconds[name] / speed, bytes=size[name]),
                "bf16": TableCost(seconds=float_seconds[name] / speed * 1.3, bytes=size[name] // 2),
                "int8": TableCost(seconds=float_seconds[name] / speed * ratio[name], bytes=size[name] // 4),
            }
            for name in names
        }
        for kind, speed in speeds.items()
    }
    penalties = {name: {"bf16": draw.uniform(0.001, 0.01), "int8": draw.uniform(0.1, 5.0)} for name in names}
    return TableCostModel(
        kinds=dict.fromkeys(speeds, count), operators=names, costs=costs, penalties=penalties, batch=32
    )


def every(given: TableCostModel, kind: str) -> list[dict[str, str]]:
    options = [given.formats(kind, name) for name in given.operators]
    return [dict(zip(given.operators, choice, strict=True)) for choice in product(*options)]


def least_penalty(given: TableCostModel, kind: str, others: dict[str, dict[str, str]], limit: float) -> float:
    """By trying all plans of one kind."""
    batches = dict.fromkeys(given.kinds, given.batch)
    most = given.limit(kind)
    return min(
        total_penalty(given, {**others, kind: plan}, batches)
        for plan in every(given, kind)
        if given.step({**others, kind: plan}, batches) <= limit
        and (most is None or given.memory(kind, plan, given.batch) <= most)
    )


@given(st.integers(0, 10_000), st.integers(3, 7))
@settings(max_examples=40, deadline=None)
def test_ilp_is_brute_force(seed: int, operators: int) -> None:
    given = cost_model({"small": 1.0}, operators, seed=seed)
    plans = every(given, "small")
    works = sorted(given.work("small", plan, 32) for plan in plans)
    budget = works[len(works) // 3]
    most = sorted(given.memory("small", plan, 32) for plan in plans)[len(plans) // 2]
    feasible = [
        plan for plan in plans if given.work("small", plan, 32) <= budget and given.memory("small", plan, 32) <= most
    ]
    if not feasible:
        with raises_problem("limits-too-low", where="small"):
            ilp(given, "small", seconds=budget, memory=most)
        return
    wanted = min(sum(given.penalty(op, f) for op, f in plan.items()) for plan in feasible)
    found = ilp(given, "small", seconds=budget + 1e-9, memory=most)
    assert sum(given.penalty(op, f) for op, f in found.items()) == pytest.approx(wanted, rel=1e-6)


@given(st.integers(0, 10_000))
@settings(max_examples=25, deadline=None)
def test_greedy_recovery_is_near_brute_force(seed: int) -> None:
    """A slow device must keep up with a fast one: within 5 % of the best plan."""
    given = cost_model({"fast": 2.0, "slow": 1.2}, 6, seed=seed)
    quick = fastest(given)
    found = recover(given, slack=0.02)
    limit = quick.seconds * 1.02
    assert found.seconds <= limit * (1 + 1e-9)
    best = least_penalty(given, "slow", {"fast": dict(found.plans["fast"])}, limit)
    assert found.penalty <= best * 1.05 + 1e-12


def test_a_device_that_has_time_stays_float() -> None:
    given = cost_model({"fast": 4.0, "slow": 1.0})
    found = recover(given)
    assert found.low["fast"] == 0
    assert found.seconds <= fastest(given).seconds * 1.02
    assert found.penalty < uniform(given, "int8").penalty


def test_what_is_not_faster_in_low_precision_stays_float() -> None:
    given = cost_model({"only": 1.0}, 8, gain=0.9, seed=3)
    plan = fastest(given).plans["only"]
    assert set(plan.values()) == {"int8", FLOAT}  # some are faster, some aren't
    for name, costs in given.costs["only"].items():
        assert (plan[name] == "int8") == (costs["int8"].seconds < costs[FLOAT].seconds)


def test_the_most_sensitive_is_raised_first() -> None:
    names = ["a", "b", "c"]
    costs = {"only": {n: {FLOAT: TableCost(seconds=2.0), "int8": TableCost(seconds=1.0)} for n in names}}
    penalties = {"a": {"int8": 1.0}, "b": {"int8": 9.0}, "c": {"int8": 4.0}}
    given = TableCostModel(kinds={"only": 1}, operators=names, costs=costs, penalties=penalties)
    assert recover(given, slack=0.34).plans["only"] == {"a": "int8", "b": FLOAT, "c": "int8"}
    assert recover(given, slack=0.67).plans["only"] == {"a": "int8", "b": FLOAT, "c": FLOAT}


def test_memory_decides_where_it_must() -> None:
    given = cost_model({"small": 1.0}, 8, gain=1.3, seed=1)  # low precision is never faster here
    whole = given.memory("small", dict.fromkeys(given.operators, FLOAT), 32)
    tight = given.with_limits(small=whole * 6 // 10)
    found = recover(tight, slack=0.5)
    assert found.memory["small"] <= whole * 6 // 10
    assert 0 < found.low["small"] < 8
    best = least_penalty(tight, "small", {}, found.seconds * 10)
    assert found.penalty <= best + 0.05 * uniform(given, "int8").penalty


def test_an_impossible_limit_is_explained() -> None:
    given = cost_model({"small": 1.0}).with_limits(small=MB)
    with pytest.raises(PlanError) as caught:
        fastest(given)
    text = str(caught.value)
    assert "small" in text
    assert "MB" in text
    assert "largest contributors op" in text


@given(st.integers(0, 10_000), st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_batches_keep_their_sum_and_nobody_is_needlessly_late(seed: int, count: int) -> None:
    given = cost_model({"fast": 2.0, "slow": 1.0, "middle": 1.5}, 4, seed=seed, count=count)
    plans = {kind: dict.fromkeys(given.operators, FLOAT) for kind in given.kinds}
    batches = split_batch(given, plans)
    assert sum(given.kinds[kind] * size for kind, size in batches.items()) == 3 * count * 32
    equal = given.step(plans, dict.fromkeys(given.kinds, 32))
    balanced = given.step(plans, batches)
    ideal = 96 / sum(32 / given.work(kind, plans[kind], 32) for kind in given.kinds)
    assert balanced < equal
    assert balanced <= ideal * (1 + 2 / min(batches.values()))


def test_precision_and_batches_together_are_fastest() -> None:
    given = cost_model({"fast": 2.0, "slow": 1.0}, 8, seed=5)
    both = recover_and_split(given)
    rivals: list[Allocation] = [recover(given), uniform(given, "int8"), uniform(given, FLOAT), dynamic_batching(given)]
    assert all(both.seconds < rival.seconds for rival in rivals)
    assert both.penalty <= uniform(given, "int8").penalty
    assert sum(both.batches.values()) == 64


def test_any_number_of_kinds() -> None:
    given = cost_model({f"kind{i}": 1 + i / 4 for i in range(5)}, 6, seed=2)
    found = recover(given)
    assert set(found.plans) == set(given.kinds)
    assert found.low["kind4"] <= found.low["kind0"]


class Begins(TableCostModel):
    """Where some operators are low, but few, the step has a cost that no single operator shows."""

    def work(self, kind: str, assignment: Assignment, batch: int) -> float:
        low = sum(format != FLOAT for format in assignment.values())
        return super().work(kind, assignment, batch) + (0.3 if 0 < low < 8 else 0.0)


def test_a_program_whose_sums_mislead_near_the_limit_finds_a_plan_further_below() -> None:
    """It gave up, and the fastest plan stayed: 12 operators low instead of 4."""
    names = [f"op{i}" for i in range(12)]
    fast = {name: {FLOAT: TableCost(seconds=1.0), "int8": TableCost(seconds=0.9)} for name in names}
    slow = {name: {FLOAT: TableCost(seconds=11.99 / 1.01 / 12)} for name in names}
    penalties = {name: {"int8": 1.0 + i / 100} for i, name in enumerate(names)}
    kinds, costs = {"fast": 1, "slow": 1}, {"fast": fast, "slow": slow}
    given = Begins(kinds=kinds, operators=names, costs=costs, penalties=penalties, batch=1)
    assert fastest(given).low["fast"] == 12
    assert integer(given).low["fast"] == 4
