"""Every strategy that returns operators to float must find the layers that lose accuracy."""

from __future__ import annotations

import pytest
import torch
from planted import workload
from torch import nn

from bitwright import Budget, Goal, Space, Tuned, tune
from bitwright.core.registry import STRATEGIES
from bitwright.tuning import CandidateGenerator, Search

ONE_BASE = Space(weights="int8/channel/sym", observer="minmax", steps=((),))
PLANTED = {20: (7,), 40: (5, 18, 31)}


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


def search(strategy: str, layers: int, *, lower: bool = False, **options: object) -> Tuned:
    # a backend without a runtime here: what counts is which operators are found, not how fast they are
    arguments: dict[str, object] = {"backend": "tensorrt", "space": ONE_BASE, "budget": Budget(trials=200), **options}
    goal = Goal(drop="10%", lower_is_better=lower)
    return tune(workload(layers, PLANTED[layers], lower=lower), goal, strategy=strategy, **arguments)  # type: ignore[arg-type]


def passes(tuned: Tuned, layers: int, floats: frozenset[str], *, lower: bool) -> bool:
    """Evaluated anew, by nothing of the search but the plan."""
    from bitwright import evaluate, quantize

    fresh = workload(layers, PLANTED[layers], lower=lower)
    reference = evaluate(fresh, fresh.model)[fresh.metric]
    plan = tuned.candidate.with_float(floats).plan(tuned.quantized.graph, "tensorrt", model=None, choices={})  # type: ignore[union-attr]
    quantized = quantize(fresh.model, fresh.calibration, backend="tensorrt", plan=plan)  # type: ignore[arg-type]
    return tuned.goal.margin(fresh.metric, reference, evaluate(fresh, quantized.model)[fresh.metric]) >= 0


@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("strategy", ["bisect", "basic", "mse", "mse_v2", "hawq_v2", "auto"])
def test_fallback_finds_the_one_planted_layer(strategy: str, lower: bool) -> None:
    tuned = search(strategy, 20, lower=lower)
    assert tuned.met_goal
    assert "7" in tuned.candidate.float
    assert len(tuned.candidate.float) <= 2


@pytest.mark.parametrize("strategy", ["hawq_v2", slow("mse_v2"), slow("mse")])
def test_fallback_finds_three_of_forty(strategy: str) -> None:
    tuned = search(strategy, 40, lower=True)
    assert tuned.met_goal
    assert {"5", "18", "31"} <= tuned.candidate.float


@pytest.mark.parametrize(("layers", "lower"), [(20, True), slow(20, False), slow(40, False), slow(40, True)])
def test_bisect_needs_a_third_of_basics_evaluations_and_its_plan_is_minimal(layers: int, lower: bool) -> None:
    ours = search("bisect", layers, lower=lower, early=False)
    theirs = search("basic", layers, lower=lower, early=False)
    assert ours.met_goal
    assert theirs.met_goal
    assert 3 * ours.full_evaluations <= theirs.full_evaluations
    assert ours.candidate.float == {str(layer) for layer in PLANTED[layers]}
    assert passes(ours, layers, ours.candidate.float, lower=lower)
    for name in ours.candidate.float:
        assert not passes(ours, layers, ours.candidate.float - {name}, lower=lower)


def test_giving_up_early_changes_nothing_but_the_work() -> None:
    early, whole = search("bisect", 40), search("bisect", 40, early=False)
    assert early.candidate == whole.candidate
    assert [asked.candidate for asked in early.history] == [asked.candidate for asked in whole.history]
    assert early.full_evaluations < whole.full_evaluations == len(whole.history)
    assert any("hypergeometric" in note for note in early.notes)


@pytest.mark.parametrize(("strategy", "trials"), [("tpe", 20), ("bayesian", 13), ("random", 20), ("exhaustive", 20)])
def test_samplers_find_a_model_that_passes_and_repeat_nothing(strategy: str, trials: int) -> None:
    tuned = search(strategy, 20, budget=Budget(trials=trials), lower=True)
    assert tuned.met_goal
    keys = [asked.candidate.key for asked in tuned.history]
    assert len(keys) == len(set(keys)) == trials
    again = search(strategy, 20, budget=Budget(trials=trials), lower=True)
    assert [asked.candidate.key for asked in again.history] == keys


def test_conservative_keeps_the_kinds_with_which_the_goal_holds() -> None:
    torch.manual_seed(1)  # of nine, the model of seed 0 is well in INT8 everywhere
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 8), nn.Linear(8, 8)).eval()
    with torch.no_grad():
        model[3].weight[2] *= 3000
        model[4].weight[:, 2] /= 3000
    from bitwright import Workload

    torch.manual_seed(0)
    data = torch.randn(200, 3, 8, 8)
    with torch.no_grad():
        target = model(data).argmax(1)
    work = Workload(
        name="kinds",
        model=model,
        inputs=(data[:1],),
        calibration=lambda: [torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(1))],
        evaluation=lambda: [(data, target)],
    )
    tuned = tune(work, Goal(drop="10%"), strategy="conservative", backend="tensorrt", space=ONE_BASE)
    assert tuned.met_goal
    assert tuned.candidate.float == {"3", "4"}


def test_a_strategy_is_one_function() -> None:
    """What docs/tune.md says: a generator that yields candidates and is sent outcomes."""

    def pairs(search: Search) -> CandidateGenerator:
        names = [op.name for op in search.space.free]
        yield [search.space.floated(None, names[i : i + 2]) for i in range(0, len(names), 2)]

    STRATEGIES.register("pairs", pairs)
    try:
        tuned = search("pairs", 20)
    finally:
        STRATEGIES.unregister("pairs")
    assert len(tuned.history) == 10
    assert tuned.met_goal
    assert tuned.candidate.float == {"6", "7"}


def test_hawq_without_a_loss_is_refused_before_any_trial() -> None:
    from dataclasses import replace

    from bitwright import BitwrightError

    with pytest.raises(BitwrightError) as caught:
        tune(replace(workload(20, (7,)), loss=None), strategy="hawq_v2", backend="tensorrt")
    assert "loss-required" in caught.value.codes
