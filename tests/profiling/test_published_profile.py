"""Profiles from data sheets: arithmetic at the peak or memory at its bandwidth, whichever is longer."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from problems import raises_problem
from torch import Tensor, nn

from bitwright import Plan, capture, prepare
from bitwright.cluster import Cluster, predict_step
from bitwright.plan import ComputeSpec
from bitwright.profiling import DeviceProfile, StepGraph, Variant, record_step
from bitwright.profiling.published_profile import derived_profile, published, published_devices
from bitwright.profiling.step_graph import extrapolate

ROWS, WIDTH, OUT = 512, 1024, 2048


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def made(device: str, format: str = "int8") -> tuple[DeviceProfile, nn.Module, Plan, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, OUT, bias=False), nn.ReLU())
    batch = (torch.randn(ROWS, WIDTH), torch.randn(ROWS, OUT))
    plan = Plan(compute={"*": ComputeSpec(format=format)}).resolve(capture(model, batch[0]))
    low = prepare(copy.deepcopy(model), plan, inputs=batch[0])
    return published(device, [Variant(model=model), Variant(model=low, plan=plan)], [batch], loss), model, plan, batch


def test_arithmetic_and_memory_at_their_share_of_the_peaks() -> None:
    profile, *_ = made("nvidia-t4")
    facts = published_devices()["nvidia-t4"]
    share, launch = facts.efficiency, 5e-6
    by = {(cost.operator.partition("(")[0], cost.format): cost for cost in profile.operators}
    operations = 2 * ROWS * WIDTH * OUT
    linear = by[("linear", "float32")]
    product = operations / (8.1e12 * share["float32"])
    assert linear.forward.seconds == pytest.approx(product + launch)
    assert linear.forward.repetitions == 0  # nobody has measured it
    assert linear.backward is not None
    assert linear.backward.seconds == pytest.approx(product + launch)  # the weight's gradient; data want none
    low = by[("linear", "kernel int8/input")]
    casts = facts.cast("float32", "int8", ROWS * WIDTH + WIDTH * OUT)
    moved = (ROWS * WIDTH + WIDTH * OUT + 4 * ROWS * OUT) / (320e9 * share["memory"])
    assert low.forward.seconds == pytest.approx(max(operations / (130e12 * share["int8"]), moved) + casts + launch)
    assert low.backward is not None
    assert low.backward.seconds == pytest.approx(product + launch)  # not in INT8
    relu = by[("relu", "float32")]
    assert relu.forward.seconds == pytest.approx(2 * 4 * ROWS * OUT / (320e9 * share["memory"]) + launch)
    assert relu.backward is not None  # it reads a gradient and the result, and writes a gradient
    assert relu.backward.seconds == pytest.approx(3 * 4 * ROWS * OUT / (320e9 * share["memory"]) + launch)
    assert (profile.source, profile.memory.limit) == ("published", 16 * 2**30)
    assert DeviceProfile.from_json(profile.to_json()) == profile


def test_a_step_of_two_kinds_is_predicted() -> None:
    profiles = {name: made(f"nvidia-{name}", "fp16")[0] for name in ("t4", "v100")}
    _, model, plan, batch = made("nvidia-t4", "fp16")
    step = record_step(model, batch, loss)
    alone = {name: predict_step(step, Plan(), profile).seconds for name, profile in profiles.items()}
    assert alone["t4"] > 1.5 * alone["v100"]
    cluster = Cluster.of({"t4": 2, "v100": 2}, link={"latency_us": 20, "gbit_per_s": 100})
    both = predict_step(step, {"t4": plan, "v100": Plan()}, profiles, cluster)
    assert both.seconds < predict_step(step, Plan(), profiles, cluster).seconds
    # a device without INT8 units gains nothing, and pays for casts
    v100, _, low, _ = made("nvidia-v100", "int8")
    assert predict_step(step, low, v100).seconds > alone["v100"]


class Attention(nn.Module):
    """Products of activations, views, and a summand."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.view(4, 8, 2, 16).transpose(1, 2)
        found = torch.matmul(heads.matmul(heads.transpose(-1, -2)).softmax(-1), heads).transpose(1, 2)
        return torch.addmm(torch.zeros(1), found.reshape(32, 32), torch.eye(32))


def test_models_with_products_of_activations_have_costs() -> None:
    x = torch.randn(4, 8, 32, requires_grad=True)
    model = nn.Sequential(nn.Linear(32, 32), Attention())
    profile = published("nvidia-a100", [Variant(model=model)], [(x, torch.randn(32, 32))], loss)
    kinds = {cost.operator.partition("(")[0]: cost.forward.seconds for cost in profile.operators}
    assert kinds["matmul"] > 0
    assert kinds["addmm"] > 0
    assert kinds["view"] == kinds["transpose"] == 0.0  # no kernel runs
    assert kinds["reshape"] > 0  # it copies a transposed tensor
    step = record_step(model, (x, torch.randn(32, 32)), loss)
    derived = predict_step(step, Plan(), derived_profile("nvidia-a100", step)).seconds
    assert predict_step(step, Plan(), profile).seconds == pytest.approx(derived)


def test_a_large_batch_costs_what_it_would_if_it_were_recorded() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))

    def recorded(count: int) -> StepGraph:
        batch = (torch.randn(count, 3, 8, 8), torch.randn(count, 4))
        return record_step(model, batch, loss)

    made = extrapolate(recorded(2), recorded(3), 11)
    assert made == recorded(11)
    assert made.samples == 11
    with raises_problem("different-steps"):
        other = record_step(model[:3], (torch.randn(3, 3, 8, 8), torch.randn(3, 8, 6, 6)), loss)
        extrapolate(recorded(2), other, 11)
    with raises_problem("invalid-value", where="large"):
        extrapolate(recorded(2), recorded(2), 11)


def test_constants_are_those_of_the_benchmark() -> None:
    """`published.yaml` has the fitted constants, rounded."""
    results = Path(__file__).parents[2] / "benchmarks" / "results" / "published_fit.json"
    fitted = json.loads(results.read_text())
    known = published_devices()
    share = known["nvidia-t4"].efficiency
    for format in ("float32", "fp16", "int8"):
        assert share[format] == pytest.approx(fitted["constants"][format], rel=0.03)
    assert known["nvidia-t4-sustained"].efficiency["float32"] == pytest.approx(fitted["constants"]["slow"], rel=0.03)
    assert share["memory"] == pytest.approx(fitted["memory"], rel=0.03)


def test_published_tables_are_complete_and_unknown_devices_rejected() -> None:
    for facts in published_devices().values():
        assert facts.operations_per_second["float32"] > 1e12
        assert facts.source
    with raises_problem("unknown-device", where="--published", mentions="'nvidia-t4'"):
        published("nvidia-t5", [], [], loss)
