"""Planning from real profiles: a device that was measured here, and one that would be half as fast."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from problems import raises_problem
from torch import Tensor, nn

from bitwright import Plan, capture, prepare
from bitwright.cluster import Cluster, Link, Predictor
from bitwright.cluster.cluster_cost_model import ClusterCostModel
from bitwright.cluster.cost_model import FLOAT, TableCost, TableCostModel
from bitwright.cluster.planners import all_float, dynamic_batching, fastest, recover, recover_and_split, uniform
from bitwright.cluster.planners.precision import over_limits
from bitwright.kernels.int8 import Int8
from bitwright.plan import ComputeSpec
from bitwright.profiling import DeviceProfile, StepGraph, Variant, profile_variants, record_step
from bitwright.profiling.device_profile import OperatorCost, OperatorTime
from bitwright.profiling.profiled_step import Clock

INT8 = ComputeSpec(format="int8", backward=("input", "weight"))
PENALTIES = {"0": {"int8": 3.0}, "2": {"int8": 1.0}, "4": {"int8": 0.1}, "6": {"int8": 9.0}}


def _chosen(timing: OperatorTime | None, seconds: float) -> OperatorTime | None:
    if timing is None:
        return None
    return timing.model_copy(update={"seconds": seconds, "low": seconds, "high": seconds})


def _with(own: DeviceProfile, factor: float, low: float) -> DeviceProfile:
    """A device `factor` times as slow, on which kernels take `low` of float's time.

    Only the operators and the fixed costs of this machine are used: times of operators depend on its load.
    """
    operators: list[OperatorCost] = []
    for cost in own.operators:
        seconds = factor * (1e-3 if "linear" in cost.operator else 1e-5)
        seconds *= low if cost.format.startswith("kernel") else 1.0
        update = {"forward": _chosen(cost.forward, seconds), "backward": _chosen(cost.backward, 2 * seconds)}
        operators.append(cost.model_copy(update=update))
    return own.model_copy(update={"operators": operators})


@pytest.fixture(scope="module")
def measured() -> tuple[StepGraph, DeviceProfile]:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for width in ((32, 64), (64, 64), (64, 64)):
        layers += [nn.Linear(*width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(64, 4))
    batch: tuple[Tensor, Tensor] = (torch.randn(64, 32), torch.randint(0, 4, (64,)))
    graph = capture(model, batch[0])
    low = Plan(compute={"*": INT8}).resolve(graph)
    kernels = prepare(copy.deepcopy(model), low, graph=graph)
    variants = [Variant(model=copy.deepcopy(model)), Variant(model=kernels, plan=low)]
    clock: Clock = "cpu" if torch.get_num_threads() == 1 else "wall"  # CPU time doesn't depend on other processes
    own = profile_variants(variants, batch, F.cross_entropy, rounds=3, clock=clock, fit_casts=False)
    return record_step(model, batch, F.cross_entropy), own


def cost_model(measured: tuple[StepGraph, DeviceProfile], **options: object) -> ClusterCostModel:
    graph, own = measured
    profiles = {"fast": _with(own, 1.0, 0.5), "slow": _with(own, 2.0, 0.5)}
    cluster = Cluster.of({"fast": 1, "slow": 1}, link=Link(latency_us=10, gbit_per_s=10))
    return ClusterCostModel(graph, profiles, cluster, PENALTIES, {"int8": INT8}, **options)  # type: ignore[arg-type]


def test_the_planner_sees_what_was_measured(measured: tuple[StepGraph, DeviceProfile]) -> None:
    given = cost_model(measured)
    assert list(given.operators) == ["0", "2", "4", "6"]
    assert given.formats("slow", "2") == [FLOAT, "int8"]
    assert given.batch == 64
    low, high = (given.work("slow", dict.fromkeys(given.operators, f), 64) for f in ("int8", FLOAT))
    assert low < high
    assert given.work("slow", {}, 128) > 1.5 * given.work("slow", {}, 64)


def test_a_kernel_may_say_its_cost_where_nobody_measured_it(
    measured: tuple[StepGraph, DeviceProfile], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, own = measured
    bare = own.model_copy(update={"operators": [c for c in own.operators if not c.format.startswith("kernel")]})

    def planner() -> ClusterCostModel:
        return ClusterCostModel(graph, {"here": bare}, Cluster.of({"here": 1}), PENALTIES, {"int8": INT8})

    assert not planner().operators
    monkeypatch.setattr(Int8, "seconds", lambda kind, shapes, spec: (1.0, 2.0 * (kind, shapes["weight"][0]).count(64)))
    told = planner()
    assert told.formats("here", "2") == [FLOAT, "int8"]
    plain, low = (told.work("here", plan, 64) for plan in ({}, {"2": "int8"}))
    assert low - plain == pytest.approx(3.0, abs=0.1)
    assert cost_model(measured).work("slow", {"2": "int8"}, 64) < 1.0  # what was measured counts more


def test_a_replay_of_the_planner_is_the_predictors(measured: tuple[StepGraph, DeviceProfile]) -> None:
    given = cost_model(measured)
    plans = {"fast": {"0": "int8"}, "slow": dict.fromkeys(given.operators, "int8")}
    seconds = given.step(plans, {"fast": 64, "slow": 64})
    own = {kind: given.plan_of(plan) for kind, plan in plans.items()}
    whole = Predictor.make(given.graph, own, given.profiles, given.cluster)
    assert seconds == pytest.approx(whole.seconds)


def test_a_plan_with_batches_is_predicted_with_them(measured: tuple[StepGraph, DeviceProfile]) -> None:
    given = cost_model(measured)
    both = recover_and_split(given)
    predicted = Predictor.make(given.graph, given.to_plan(both), given.profiles, given.cluster).predict()
    assert predicted.seconds == pytest.approx(both.seconds)
    assert predicted.samples == 128
    for device in predicted.devices:
        alone = predicted.locals[device.name].phases["backward"]
        assert device.phases["backward"] == pytest.approx(alone * both.batches[device.name] / 64)
    memory = {device.name: device.memory for device in predicted.devices}
    assert memory["fast"].process == both.memory["fast"]  # type: ignore[union-attr]


def test_the_slow_device_is_low_and_the_fast_one_is_not(measured: tuple[StepGraph, DeviceProfile]) -> None:
    given = cost_model(measured)
    found = recover(given)
    assert found.low["fast"] == 0
    assert found.low["slow"] > 0
    assert found.seconds <= fastest(given).seconds * 1.021
    assert found.penalty < uniform(given, "int8").penalty
    plan = given.to_plan(found, model="chain")
    assert Plan.from_yaml(plan.to_yaml()) == plan
    assert set(plan.devices["slow"].compute) == {op for op, f in found.plans["slow"].items() if f != FLOAT}
    assert "operators low" in plan.devices["slow"].why


def test_precision_and_batches_together_are_the_fastest(measured: tuple[StepGraph, DeviceProfile]) -> None:
    given = cost_model(measured)
    both = recover_and_split(given)
    assert both.batches["fast"] > both.batches["slow"]
    assert sum(both.batches.values()) == 128
    for rival in (recover(given), uniform(given, "int8"), uniform(given, FLOAT), dynamic_batching(given)):
        assert both.seconds < rival.seconds
    assert given.to_plan(both).devices["slow"].batch == both.batches["slow"]


def test_layers_are_kept_in_float_by_name(measured: tuple[StepGraph, DeviceProfile]) -> None:
    assert list(cost_model(measured, keep_float=["[06]"]).operators) == ["2", "4"]
    with raises_problem("unknown-operator", where="keep_float"):
        cost_model(measured, keep_float=["head"])


def test_memory_that_is_too_small_is_explained(measured: tuple[StepGraph, DeviceProfile]) -> None:
    given = cost_model(measured)
    tiny = {**given.cluster.devices, "slow": given.cluster.devices["slow"].model_copy(update={"memory_gb": 1e-6})}
    given.cluster = replace(given.predictor, cluster=given.cluster.model_copy(update={"devices": tiny})).cluster
    with raises_problem("plan-exceeds-memory", mentions="`slow`"):
        fastest(given)


def test_planners_leave_the_reserve_free(measured: tuple[StepGraph, DeviceProfile]) -> None:
    """A plan that needs the limit to its last byte is none: predictions are some percent wrong."""
    given = cost_model(measured)
    needs = given.memory("slow", dict.fromkeys(given.operators, FLOAT), given.batch)

    def with_reserve(share: float) -> None:
        slow = given.cluster.devices["slow"].model_copy(
            update={"memory_gb": needs / 1e9 + 1e-9, "memory_reserve": share}
        )
        devices = {**given.cluster.devices, "slow": slow}
        given.cluster = given.cluster.model_copy(update={"devices": devices})

    with_reserve(0.0)
    assert over_limits(given, all_float(given)) == []
    with_reserve(0.5)
    (problem,) = over_limits(given, all_float(given))
    assert problem.code == "plan-exceeds-memory"
    assert "50 %" in problem.what
    assert problem.fix is not None
    assert "reserve" in problem.fix
    with_reserve(20_000 / needs)  # some samples' worth
    batches = dynamic_batching(given)
    assert batches.memory["slow"] <= given.limit("slow") == given.memory_limit("slow").usable  # type: ignore[operator, union-attr]


def test_what_a_process_needs_is_the_sum_of_its_parts(measured: tuple[StepGraph, DeviceProfile]) -> None:
    """The compiler, too, which INT8 brings; nothing large is missing in the explanation."""
    graph, own = measured
    memory = own.memory.model_copy(update={"process": 10**6, "compiler": 10**6})
    given = cost_model((graph, own.model_copy(update={"memory": memory})))
    for format in (FLOAT, "int8"):
        plan = dict.fromkeys(given.operators, format)
        parts = given.parts("slow", plan, 64)
        assert parts["torch's compiler"] == (10**6 if format == "int8" else 0)
        assert sum(parts.values()) == pytest.approx(given.memory("slow", plan, 64), rel=0.01)


def test_the_operators_of_a_deep_model_are_explained_together() -> None:
    names = [f"op{i}" for i in range(200)]
    costs = {"only": {name: {FLOAT: TableCost(seconds=1.0, bytes=10**7)} for name in names}}

    class Deep(TableCostModel):
        def parts(self, kind: str, assignment: Mapping[str, str], batch: int) -> Mapping[str, int]:
            return {"weights": 10**8, **{f"activations of {name}": 10**7 for name in assignment}}

    given = Deep(kinds={"only": 1}, operators=names, costs=costs, penalties={}, batch=4, limits={"only": 10**9})
    with raises_problem("plan-exceeds-memory", mentions="200 operators (most: op0 0.01 GB) 2 GB") as caught:
        fastest(given)
    assert "2 of 4 samples fit: --batch 2" in str(caught.value)  # there is no other device


@pytest.mark.slow
def test_operators_that_read_the_same_are_known() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 2)
            self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x)
            out: Tensor = self.head(self.q(x) * self.k(x) + self.v(x))
            return out

    torch.manual_seed(0)
    model, batch = Attention(), (torch.randn(4, 8), torch.randint(0, 2, (4,)))
    low = Plan(compute={"*": INT8}).resolve(capture(model, batch[0]))
    variants = [Variant(model=copy.deepcopy(model))]
    variants.append(Variant(model=prepare(copy.deepcopy(model), low, inputs=batch[0]), plan=low))
    own = profile_variants(variants, batch, F.cross_entropy, rounds=1, fit_casts=False)
    step = record_step(model, batch, F.cross_entropy)
    penalties = {name: {"int8": 1.0} for name in "qkv"} | {"head": {"int8": 1.0}}
    given = ClusterCostModel(step, {"here": own}, Cluster.of({"here": 1}), penalties, {"int8": INT8})
    assert {name: set(given.shares_input_with(name)) for name in given.operators} == {
        "q": {"k", "v"},
        "k": {"q", "v"},
        "v": {"q", "k"},
        "head": set(),
    }


@pytest.mark.slow
def test_convolutions_behind_convolutions_can_be_low() -> None:
    """What a kernel hands on has the strides that the float operator's result has, or the next one isn't found."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 3))
    batch = (torch.randn(4, 2, 8, 8), torch.randint(0, 3, (4,)))
    graph = capture(model, batch[0])
    low = Plan(compute={"*": INT8}).resolve(graph)
    variants = [
        Variant(model=copy.deepcopy(model)),
        Variant(model=prepare(copy.deepcopy(model), low, graph=graph), plan=low),
    ]
    own = profile_variants(variants, batch, F.cross_entropy, rounds=3, fit_casts=False)
    step = record_step(model, batch, F.cross_entropy)
    penalties = {name: {"int8": 1.0} for name in ("0", "2", "4")}
    cost_model = ClusterCostModel(step, {"here": own}, Cluster.of({"here": 1}), penalties, {"int8": INT8})
    assert cost_model.operators == ["0", "2", "4"]
    assert cost_model.work("here", {"2": "int8"}, 4) != cost_model.work("here", {}, 4)
