from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import two_ranks
from problems import raises_problem
from step_cases import bert, digits, int8_plan, net, prepared, profile_of, timed_sample
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bitwright import load_workload, predict, profile
from bitwright.cluster import Cluster, DeviceStep, Link, MemoryLimit, Predictor, make_buckets, predict_step, write_trace
from bitwright.cluster.cluster_plan import compare_planners
from bitwright.cluster.memory import RESERVE
from bitwright.core import tensor_tree as tree
from bitwright.core.errors import PlanError
from bitwright.plan import Plan
from bitwright.profiling import StepSettings, Variant, record_step
from bitwright.profiling.cost_key import TensorSpec
from bitwright.profiling.device_profile import (
    CollectiveCost,
    DeviceProfile,
    MemoryFacts,
    OperatorTime,
    relative_uncertainty,
)
from bitwright.training.distributed import joined_group

YAML = """
bitwright_cluster: 1
link: {latency_us: 10, gbit_per_s: 8}
devices:
  big: {profile: big.json, count: 2, memory_gb: 40}
  small: {profile: small.json, count: 6, link: {latency_us: 100, gbit_per_s: 1}}
"""


def test_a_cluster_is_read() -> None:
    cluster = Cluster.from_yaml(YAML)
    assert cluster.world == 8
    ring = cluster.collective("all_reduce", {}, 8)
    assert ring.latency == pytest.approx(14 * 100e-6)
    assert ring.per_byte == pytest.approx(14 / 8 * 8e-9)  # the slowest link is everybody's


def test_a_part_of_memory_is_left_free() -> None:
    """The kind's own share, else the cluster's, else a usual one; of the file's memory, else of the profile's."""
    profile = DeviceProfile(bitwright_profile=1, device="here", tensors=[], memory=MemoryFacts(limit=10**9))
    kinds = "devices: {a: {memory_gb: 40, memory_reserve: 0}, b: {memory_gb: 40}, c: {}}"
    for line, share in (("memory_reserve: 0.25", 0.25), ("", RESERVE)):
        cluster = Cluster.from_yaml(f"bitwright_cluster: 1\n{line}\n{kinds}")
        limits = [cluster.memory_limit(kind, profile) for kind in "abc"]
        expected = [(40 * 10**9, 0.0), (40 * 10**9, share), (10**9, share)]
        assert limits == [MemoryLimit(total=total, reserve=reserve) for total, reserve in expected]
    unknown = profile.model_copy(update={"memory": MemoryFacts(limit=None)})
    assert cluster.memory_limit("c", unknown) is None
    with raises_problem("invalid-value", where="devices.a.memory_reserve"):
        Cluster.from_yaml("bitwright_cluster: 1\ndevices: {a: {memory_reserve: 7}}")


def test_all_problems_of_a_cluster_are_reported() -> None:
    with pytest.raises(PlanError) as error:
        Cluster.from_yaml("bitwright_cluster: 1\ndevices: {a: {profile: x, count: 0}, b: {profile: 3, memory_gb: -1}}")
    assert {problem.where for problem in error.value.problems} == {
        "devices.a.count",
        "devices.b.profile",
        "devices.b.memory_gb",
    }


def test_measured_collectives_are_used_and_missing_ones_reported() -> None:
    measured = CollectiveCost(operation="all_reduce", backend="gloo", world=2, latency=1e-3, per_byte=1e-9)
    made = profile_of([]).model_copy(update={"collectives": [measured]})
    cluster = Cluster.of({"a": 2})
    assert cluster.collective("all_reduce", {"a": made}, 2) == measured
    with raises_problem("unknown-link", where="cluster, a", mentions="measured among 2"):
        cluster.collective("all_reduce", {"a": made}, 3)
    partly = Cluster.from_yaml(
        "bitwright_cluster: 1\ndevices:\n  a: {profile: a.json, link: {gbit_per_s: 1}}\n  b: {profile: b.json}\n"
    )
    with raises_problem("unknown-link", where="cluster, b") as error:
        partly.collective("all_reduce", {}, 2)
    assert error.value.problems[0].where == "cluster, b"  # a has one


@pytest.mark.parametrize("cap", [None, 0.005, 1])
def test_buckets_are_those_of_ddp(cap: float | None, tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    batch = (torch.randn(4, 64), torch.randint(0, 64, (4,)))
    graph = record_step(model, batch, F.cross_entropy)
    ours = make_buckets([(name, graph.parameters[name]) for name in graph.gradient_order], cap)
    with joined_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1):
        net_ = DistributedDataParallel(model, bucket_cap_mb=cap)  # type: ignore[arg-type]
        for _ in range(3):
            F.cross_entropy(net_(batch[0]), batch[1]).backward()
        theirs = net_._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    assert ", ".join(str(bucket.bytes) for bucket in ours) == theirs


def test_buckets_of_folded_norms_are_those_of_ddp(tmp_path: Path) -> None:
    """In two real processes: a folded norm's weight gets its gradient with its convolution's."""
    model, batch, loss = digits()
    graph = record_step(model, batch, loss)
    plan = int8_plan(model, batch)
    assert plan.folds
    made = profile_of(timed_sample(prepared(model, batch, plan), batch, loss).calls)
    trained = DeviceStep.build(graph, plan, made, StepSettings(fuse=False)).trained
    theirs = two_ranks.run(Path(__file__).parent / "buckets_worker.py", tmp_path, seconds=300)
    for cap, sizes in theirs[0].items():
        ours = [bucket.bytes for bucket in make_buckets(trained, cap)]
        assert len(ours) > 1
        assert ", ".join(map(str, ours)) == sizes


def test_a_big_tensor_has_a_bucket_of_its_own() -> None:
    specs = [("a", TensorSpec((10,), "float32")), ("b", TensorSpec((1 << 20,), "float32"))]
    assert [bucket.names for bucket in make_buckets(specs, None)] == [("a", "b")]
    assert make_buckets([], None) == []


def test_plans_and_profiles_by_kind(tmp_path: Path) -> None:
    model, batch, loss = net()
    graph = record_step(model, batch, loss)
    plan = int8_plan(model, batch)
    settings = StepSettings(fuse=False)
    keys = {
        *timed_sample(prepared(model, batch, plan), batch, loss).calls,
        *timed_sample(Variant(model=model), batch, loss).calls,
    }
    fast, slow = profile_of(keys), profile_of(keys, forward=3e-3, backward=6e-3)
    cluster = Cluster.of({"fast": 2, "slow": 1}, link=Link(latency_us=1, gbit_per_s=10))
    made = predict_step(graph, {"fast": plan, "slow": Plan()}, {"fast": fast, "slow": slow}, cluster, settings)
    kinds = {device.name: device for device in made.devices}
    assert kinds["slow"].waiting < 0.05 < kinds["fast"].waiting
    assert kinds["fast"].busy + kinds["fast"].waiting == pytest.approx(1.0)
    assert made.seconds >= kinds["slow"].computing
    assert "slow" in made.critical[0]
    assert made.samples == 12
    with raises_problem("plan-required", where="slow"):
        predict_step(graph, {"fast": plan}, {"fast": fast, "slow": slow}, cluster, settings)
    with raises_problem("profile-required", where="slow"):
        predict_step(graph, plan, {"fast": fast}, cluster, settings)
    events = json.loads(write_trace(made, tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["cat"] for event in spans} == {"forward", "backward", "collective", "tail"}
    ends = max(event["ts"] + event["dur"] for event in spans)
    assert 1e-6 * ends == pytest.approx(made.seconds, rel=0.05)
    for pid in (1, 2):  # one thing at a time on each compute lane
        lane = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if e["pid"] == pid and e["tid"] == 1)
        assert all(end <= start + 0.01 for (_, end), (start, _) in pairwise(lane))


def test_the_critical_path_begins_with_the_step() -> None:
    """A batch whose times lie on the line through two measured ones has phases on that line: no forward below 0."""
    model, batch, loss = net()
    half = tree.slice_batch(batch, 0, tree.batch_size(batch) // 2)
    keys = {
        *timed_sample(Variant(model=model), batch, loss).calls,
        *timed_sample(Variant(model=model), half, loss).calls,
    }
    cluster = Cluster.of({"fast": 1, "slow": 1}, link=Link(latency_us=1, gbit_per_s=10))
    profiles = {"fast": profile_of(keys), "slow": profile_of(keys, forward=3e-3, backward=6e-3)}
    graph, small = record_step(model, batch, loss), record_step(model, half, loss)
    sizes = {"slow": 5 * graph.samples}
    made = Predictor.make(graph, Plan(), profiles, cluster, batches=sizes, smaller=small).predict()
    assert made.critical[0].startswith("slow: forward, ")
    slow = next(device for device in made.devices if device.name == "slow")
    assert float(made.critical[0].split()[-2]) > 0
    assert sum(slow.phases.values()) == pytest.approx(slow.computing, rel=0.05)


def test_a_thousand_devices_and_a_changed_operator() -> None:
    """How long it takes is benchmarks/predict_scale.py's business."""
    model, batch, loss = bert(layers=4)
    graph = record_step(model, batch, loss)
    plan = int8_plan(model, batch)
    settings = StepSettings(fuse=False, bucket_cap_mb=0.02)
    keys = {
        *timed_sample(prepared(model, batch, plan), batch, loss).calls,
        *timed_sample(Variant(model=model), batch, loss).calls,
    }
    kinds = {name: profile_of(keys, forward=(n + 1) * 1e-4) for n, name in enumerate("abcd")}
    cluster = Cluster.of(dict.fromkeys("abcd", 256), link=Link(latency_us=5, gbit_per_s=100))
    predictor = Predictor.make(graph, plan, kinds, cluster, settings)
    folded = predictor.predict()
    assert len(folded.buckets) > 3
    assert predictor.predict(exact=True).seconds == pytest.approx(folded.seconds)
    name = "bert.encoder.layer.2.output.dense"
    changed = replace(plan, sites={s: spec for s, spec in plan.sites.items() if not s.startswith(f"{name}:")})
    again = predictor.changed("d", changed, {name}).seconds
    plans = {**dict.fromkeys("abc", plan), "d": changed}
    assert again == pytest.approx(Predictor.make(graph, plans, kinds, cluster, settings).seconds)


def published(spread: float) -> DeviceProfile:
    """A derived profile with slow float operators, with confidence intervals of ± `spread` relative to each time."""
    made = profile(load_workload("digits-untrained"), published="nvidia-t4", kernels=["int8"], batch=8)
    operators = []
    for cost in made.operators:
        time = cost.forward if cost.format.startswith("kernel") else OperatorTime(seconds=100 * cost.forward.seconds)
        low, high = max(0.0, 1 - spread) * time.seconds, (1 + spread) * time.seconds
        operators.append(cost.model_copy(update={"forward": time.model_copy(update={"low": low, "high": high})}))
    return made.model_copy(update={"operators": operators})


def test_uncertain_times_are_a_warning_of_predictions_and_plans(caplog: pytest.LogCaptureFixture) -> None:
    workload, scores = load_workload("digits-untrained"), {"conv1": {"int8": 0.1}, "conv2": {"int8": 0.2}}
    gains = {}
    for name, spread in (("sure", 0.01), ("unsure", 40.0)):
        caplog.clear()
        device = published(spread)
        assert [p.code for p in predict(workload, device, batch=8).warnings] == ["uncertain-times"] * (name == "unsure")
        found = compare_planners(workload, Cluster.of({"t4": 1}), scores, profiles={"t4": device}, batch=8)
        assert ("uncertain" in caplog.text) == (name == "unsure")
        gains[name] = found.doubtful_gain
        assert (found.to_dict()["uncertainty"] > 1) == (name == "unsure")
        assert not found.gains_nothing
        if name == "unsure":
            assert found.faster is None
    assert gains["sure"] is None
    assert gains["unsure"] is not None


def test_times_of_zero_are_as_uncertain_as_can_be() -> None:
    operator = published(0.1).operators[0]
    nothing = operator.model_copy(update={"forward": OperatorTime(seconds=0.0, low=0.0, high=1e-3)})
    assert relative_uncertainty([nothing]) == math.inf
    assert relative_uncertainty([]) == 0.0
