"""The simulation of large clusters, against the exact replay, formulas of collectives, and single devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import raises_problem
from torch import nn

from bitwright.cluster import Cluster, Link, Nodes
from bitwright.cluster.cluster import ring
from bitwright.cluster.cluster_cost_model import ClusterCostModel
from bitwright.cluster.data_parallel import Lane, replay
from bitwright.cluster.planners import all_float, recover_and_split, split_batch
from bitwright.cluster.simulation import Disruptions, Groups, Policy, period_of_states, simulate_training
from bitwright.core.errors import PlanError
from bitwright.plan import ComputeSpec
from bitwright.profiling import StepGraph, record_step
from bitwright.profiling.published_profile import derived_profile

CALM = Disruptions(slow_every_hours=1e9, fails_every_hours=1e12)
FP16 = ComputeSpec(format="fp16", backward=("input", "weight"))
lanes = st.builds(
    lambda ready, more, tail, contention, stretch: Lane(
        "a device", tuple(np.cumsum(ready)), sum(ready) + more, tail, contention, stretch=stretch
    ),
    st.lists(st.floats(0, 1), min_size=2, max_size=2),
    st.floats(0, 1),
    st.floats(0, 0.1),
    st.sampled_from([0.0, 0.3, 0.9]),
    st.sampled_from([1.0, 1.5]),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(lanes, min_size=1, max_size=4), st.floats(0, 2), st.floats(0, 0.2))
def test_states_are_replayed_as_single_steps(own: list[Lane], collective: float, first: float) -> None:
    exact = replay(own, [collective, collective / 2], first).period
    assert period_of_states(Groups.of(own), [collective, collective / 2], first)[0] == pytest.approx(exact, abs=1e-9)


@cache
def step() -> StepGraph:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 8))
    return record_step(model, (torch.randn(64, 256), torch.randint(0, 8, (64,))), F.cross_entropy)


def costs(counts: Mapping[str, int], **more: object) -> ClusterCostModel:
    profiles = {f"{kind}": derived_profile(f"nvidia-{kind}", step(), ["kernel fp16/input+weight"]) for kind in counts}
    cluster = Cluster.of(dict(counts), link=Link(latency_us=5, gbit_per_s=25), **more)
    penalties = {op.name: {"fp16": 1.0} for op in step().ops if op.call.kind == "linear"}
    return ClusterCostModel(step(), profiles, cluster, penalties, {"fp16": FP16})


@pytest.mark.parametrize("planner", [all_float, recover_and_split])
def test_a_calm_cluster_takes_the_predicted_step(planner: object) -> None:
    model = costs({"t4": 4, "v100": 2})
    policy = Policy(name="one", planner=planner)  # type: ignore[arg-type]
    found = simulate_training(model, hours=0.5, seeds=2, disruptions=CALM, policies=[policy]).baseline
    plan = policy.planner(model)
    samples = sum(count * plan.batches[kind] for kind, count in model.kinds.items())
    assert found.rates == pytest.approx([samples / plan.seconds] * 2, rel=1e-9)
    assert found.lost == (0.0, 0.0)


def test_slow_devices_delay_all_others_until_batches_follow() -> None:
    model = costs({"t4": 8, "v100": 8})
    often = Disruptions(slow_every_hours=2.0, slow_minutes=30.0, slowdowns=(2.0,), fails_every_hours=1e12)
    policies = [
        Policy(name="static", planner=recover_and_split),
        Policy(name="adapted", planner=recover_and_split, adaptive=True),
    ]
    found = simulate_training(model, hours=4, seeds=5, disruptions=often, policies=policies)
    static, adapted = found.results
    assert all(a > s for a, s in zip(adapted.rates, static.rates, strict=True))
    mean, low, high = adapted.interval(static)
    assert 1.0 < low < mean < high
    calm = simulate_training(model, hours=4, seeds=1, disruptions=CALM, policies=policies)
    assert static.interval()[0] < calm.results[0].rates[0]
    # batches from known speeds can't make a step faster than without slow devices
    assert max(adapted.rates) < calm.results[1].rates[0] * 1.001


def test_equal_seeds_give_equal_results_and_other_seeds_others() -> None:
    model = costs({"t4": 8})
    policy = [Policy(name="one", planner=all_float)]
    often = Disruptions(slow_every_hours=1.0, fails_every_hours=100.0)
    runs = [simulate_training(model, hours=2, seeds=3, disruptions=often, policies=policy) for _ in range(2)]
    assert runs[0].to_dict() == runs[1].to_dict()
    assert len(set(runs[0].baseline.rates)) == 3


def test_states_of_a_simulation_equal_single_devices() -> None:
    """One slow device among many, without adaptation: the step of the replay with that device as its own lane."""
    model = costs({"t4": 6})
    plan = all_float(model)
    lane = model.lane("t4", plan.plans["t4"], 64)
    slow = replace(
        lane,
        ready=tuple(2 * time for time in lane.ready),
        computing=2 * lane.computing,
        tail=2 * lane.tail,
    )
    expected = replay([replace(lane, count=5), slow], model.predictor.collectives).period
    always = Disruptions(slow_every_hours=1e-9, slow_minutes=1e9, slowdowns=(2.0,), fails_every_hours=1e12)
    found = simulate_training(
        model, hours=1, seeds=1, disruptions=always, policies=[Policy(name="one", planner=all_float)]
    )
    assert found.baseline.rates[0] == pytest.approx(6 * 64 / expected, rel=1e-6)


def test_failures_cost_lost_work_and_repairs() -> None:
    model = costs({"t4": 16}, nodes=Nodes(devices=4, link=Link(gbit_per_s=1000)))
    failing = Disruptions(
        slow_every_hours=1e9, fails_every_hours=40.0, repair_minutes=30, restart_minutes=2, checkpoint_minutes=10
    )
    policies = [
        Policy(name="static", planner=all_float),
        Policy(name="elastic", planner=all_float, adaptive=True, switch_seconds=0.0),
    ]
    found = simulate_training(model, hours=20, seeds=4, disruptions=failing, policies=policies)
    static, elastic = found.results
    assert np.mean(static.lost) > 3 * np.mean(elastic.lost) > 0
    assert np.mean(elastic.rates) > np.mean(static.rates)
    # about 8 failures in 20 hours: at least 30 minutes each, unless they overlap
    assert 0.05 < np.mean(static.lost) < 0.5


def test_adapted_batches_are_as_good_as_the_planner_of_batches() -> None:
    model = costs({"t4": 4, "v100": 4})
    plan = all_float(model)
    planned = split_batch(model, plan.plans)
    best = model.step(plan.plans, planned)
    adaptive = Policy(name="adapted", planner=all_float, adaptive=True)
    found = simulate_training(model, hours=0.2, seeds=1, disruptions=CALM, policies=[adaptive]).baseline
    assert found.rates[0] == pytest.approx(8 * 64 / best, rel=0.03)


def test_nothing_to_simulate_is_an_error() -> None:
    model = costs({"t4": 2})
    with raises_problem("invalid-value", where="hours"):
        simulate_training(model, hours=0.0)
    with raises_problem("invalid-value", where="policies"):
        simulate_training(model, policies=[])


# -- collectives ---------------------------------------------------------------------------------------------------


def ring_by_messages(world: int, bytes: float, latency: float, per_byte: float) -> float:
    """Each message of a ring all-reduce: a device sends its next part when it has received and added the last one."""
    done = np.zeros(world)
    for _ in range(2 * (world - 1)):
        sent = done + latency + per_byte * bytes / world
        done = np.maximum(done, np.roll(sent, 1))  # a device continues with what its neighbour sent
    return float(done.max())


@pytest.mark.parametrize("world", [2, 3, 8, 64])
def test_a_ring_costs_what_its_messages_cost(world: int) -> None:
    link = Link(latency_us=20, gbit_per_s=8)
    latency, per_byte = ring(world, link)
    assert latency + 1e6 * per_byte == pytest.approx(ring_by_messages(world, 1e6, 20e-6, 1e-9))


def hierarchical_by_messages(nodes: int, devices: int, bytes: float, inside: Link, between: Link) -> float:
    """Reduce-scatter in each node, rings between nodes that share each node's link, all-gather in each node."""
    half = ring_by_messages(devices, bytes, inside.seconds, inside.seconds_per_byte) / 2
    part = bytes / devices  # each device reduces its part with its peers of other nodes, at 1/devices of the link
    middle = ring_by_messages(nodes, part, between.seconds, devices * between.seconds_per_byte)
    return half + middle + half


def test_a_hierarchical_all_reduce_costs_what_its_messages_cost() -> None:
    inside, between = Link(latency_us=2, gbit_per_s=2400), Link(latency_us=20, gbit_per_s=100)
    cluster = Cluster.of({"a": 32}, link=between, nodes=Nodes(devices=8, link=inside), all_reduce="hierarchical")
    made = cluster.collective("all_reduce", {}, 32)
    expected = hierarchical_by_messages(4, 8, 1e8, inside, between)
    assert made.latency + 1e8 * made.per_byte == pytest.approx(expected)
    flat = cluster.model_copy(update={"all_reduce": "ring"}).collective("all_reduce", {}, 32)
    assert flat.latency == pytest.approx(62 * 20e-6)
    assert flat.latency + 1e8 * flat.per_byte > made.latency + 1e8 * made.per_byte


def test_nodes_must_be_whole() -> None:
    text = "bitwright_cluster: 1\nlink: {gbit_per_s: 1}\n"
    with pytest.raises(PlanError):
        Cluster.from_yaml(f"{text}all_reduce: hierarchical\ndevices: {{a: {{count: 4}}}}")
    with pytest.raises(PlanError):
        Cluster.from_yaml(f"{text}nodes: {{devices: 8, link: {{gbit_per_s: 9}}}}\ndevices: {{a: {{count: 4}}}}")
