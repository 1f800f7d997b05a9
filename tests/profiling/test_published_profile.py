"""Profiles from data sheets: arithmetic at the peak or memory at its bandwidth, whichever is longer."""

from __future__ import annotations

import copy

import pytest
import torch
from problems import raises_problem
from torch import Tensor, nn

from bitwright import Plan, capture, prepare
from bitwright.cluster import Cluster, predict_step
from bitwright.plan import ComputeSpec
from bitwright.profiling import DeviceProfile, Variant, record_step
from bitwright.profiling.published_profile import published, published_devices

ROWS, WIDTH, OUT = 512, 1024, 2048


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def made(device: str) -> tuple[DeviceProfile, nn.Module, Plan, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, OUT, bias=False), nn.ReLU())
    batch = (torch.randn(ROWS, WIDTH), torch.randn(ROWS, OUT))
    plan = Plan(compute={"*": ComputeSpec(format="int8")}).resolve(capture(model, batch[0]))
    low = prepare(copy.deepcopy(model), plan, inputs=batch[0])
    return published(device, [Variant(model=model), Variant(model=low, plan=plan)], [batch], loss), model, plan, batch


def test_arithmetic_and_memory_at_their_peaks() -> None:
    profile, *_ = made("nvidia-t4")
    by = {(cost.operator.partition("(")[0], cost.format): cost for cost in profile.operators}
    operations = 2 * ROWS * WIDTH * OUT
    linear = by[("linear", "float32")]
    assert linear.forward.seconds == pytest.approx(operations / 8.1e12)
    assert linear.forward.repetitions == 0  # nobody has measured it
    assert linear.backward is not None
    assert linear.backward.seconds == pytest.approx(operations / 8.1e12)  # the weight's gradient; data want none
    low = by[("linear", "kernel int8/input")]
    bytes = 4 * (ROWS * WIDTH + WIDTH * OUT + ROWS * OUT)
    assert low.forward.seconds == pytest.approx(max(operations / 130e12, bytes / 320e9))
    assert low.backward is not None
    assert low.backward.seconds == pytest.approx(operations / 8.1e12)  # not in INT8
    assert by[("relu", "float32")].forward.seconds == pytest.approx(2 * 4 * ROWS * OUT / 320e9)
    assert (profile.source, profile.memory.limit) == ("published", 16 * 2**30)
    assert DeviceProfile.from_json(profile.to_json()) == profile


def test_a_step_of_two_kinds_is_predicted() -> None:
    profiles = {name: made(f"nvidia-{name}")[0] for name in ("t4", "v100")}
    _, model, plan, batch = made("nvidia-t4")
    step = record_step(model, batch, loss)
    alone = {name: predict_step(step, Plan(), profile).seconds for name, profile in profiles.items()}
    assert alone["t4"] > 1.5 * alone["v100"]
    cluster = Cluster.of({"t4": 2, "v100": 2}, link={"latency_us": 20, "gbit_per_s": 100})
    both = predict_step(step, {"t4": plan, "v100": Plan()}, profiles, cluster)
    assert both.seconds < predict_step(step, Plan(), profiles, cluster).seconds
    # a device without INT8 units gains nothing
    assert predict_step(step, plan, profiles["v100"]).seconds == pytest.approx(alone["v100"])


def test_published_tables_are_complete_and_unknown_devices_rejected() -> None:
    for facts in published_devices().values():
        assert facts.operations_per_second["float32"] > 1e12
        assert facts.source
    with raises_problem("unknown-device", where="--published", mentions="'nvidia-t4'"):
        published("nvidia-t5", [], [], loss)
