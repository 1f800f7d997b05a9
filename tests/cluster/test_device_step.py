from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from problems import raises_problem
from step_cases import digits, int8_plan, net, prepared, profile_of, timed_sample
from torch import nn

from bitwright.cluster import DeviceStep, Predictor, predict_step
from bitwright.core.errors import PlanError
from bitwright.core.formats import Format
from bitwright.plan import FoldSpec, Plan, SiteSpec
from bitwright.profiling import IMPLEMENTATIONS, Cast, Execution, OperatorUnderPlan, StepSettings, Variant, record_step
from bitwright.profiling.device_profile import CastCost, Line, OperatorTime, TensorsCost
from bitwright.profiling.profiled_step import restricted


def test_phases_and_operators_add_up_to_the_step() -> None:
    model, batch, loss = net()
    graph = record_step(model, batch, loss)
    made = profile_of(timed_sample(Variant(model=model), batch, loss).calls)
    local = DeviceStep.build(graph, Plan(), made, StepSettings())
    calls = len(graph.ops)
    assert local.phases["forward"] == pytest.approx(calls * 1e-3)
    assert local.phases["backward"] == pytest.approx((calls + 1) * 2e-3)
    assert predict_step(graph, Plan(), made).seconds == pytest.approx(calls * 1e-3 + 1e-3 + (calls + 1) * 2e-3)


def test_clipping_accumulation_and_the_optimizer_are_in_the_step() -> None:
    model, batch, loss = net()
    graph = record_step(model, batch, loss)
    made = profile_of(timed_sample(Variant(model=model), batch, loss).calls)
    costs = {"sgd/loop": 1.0, "adamw/loop": 3.0, "clip": 10.0, "accumulate": 100.0, "zero_grad": 0.0}
    tensors = [TensorsCost(name=name, per_element=0, per_tensor=0, fixed=s) for name, s in costs.items()]
    made = made.model_copy(update={"tensors": tensors})

    def seconds(**settings: object) -> float:
        return predict_step(graph, Plan(), made, settings=StepSettings.model_validate(settings)).seconds

    once = seconds() - 1.0
    assert seconds(optimizer="adamw") == pytest.approx(once + 3)
    assert seconds(clip=1.0) == pytest.approx(once + 11)
    assert seconds(accumulate=3) == pytest.approx(3 * once + 200 + 1)


def test_all_missing_measurements_are_reported_together() -> None:
    model, batch, loss = net()
    graph = record_step(model, batch, loss)
    plan = int8_plan(model, batch)
    made = profile_of(timed_sample(Variant(model=model), batch, loss).calls)
    with pytest.raises(PlanError) as error:
        DeviceStep.build(graph, plan, made, StepSettings(fuse=False))
    missing = {problem.where for problem in error.value.problems}
    assert {"conv:weight", "conv:input", "head:weight"} <= missing
    assert "bitwright profile" in str(error.value)
    for source, option in (("published", "--published"), ("imported", "--trace")):
        with raises_problem("not-profiled", where="conv:weight", mentions=option):
            DeviceStep.build(graph, plan, made.model_copy(update={"source": source}), StepSettings(fuse=False))


def test_a_batch_that_the_profile_has_is_named() -> None:
    model, batch, loss = net()
    graph = record_step(model, (batch[0][:2], batch[1][:2]), loss)
    made = profile_of(timed_sample(Variant(model=model), batch, loss).calls)
    with raises_problem("not-profiled", where="conv", mentions="--batch 4"):
        DeviceStep.build(graph, Plan(), made, StepSettings())


def test_an_operator_that_was_not_measured_in_its_format_is_counted() -> None:
    model, batch, loss = net()
    graph = record_step(model, batch, loss)
    plan = replace(int8_plan(model, batch), sites={})
    made = profile_of(timed_sample(Variant(model=model), batch, loss).calls)
    assert plan.fold  # the norm is folded, which was never measured
    device = predict_step(graph, plan, made).devices[0]
    assert device.stood_in == 2


def test_unknown_sizes_of_casts_are_fitted() -> None:
    model, batch, loss = net()
    graph = record_step(model, batch, loss)
    plan = Plan(sites={"head:input": SiteSpec(format=Format.parse("int8/tensor/sym"), quantizer="lsq")})
    made = profile_of(timed_sample(Variant(model=model), batch, loss).calls)
    line = Line(per_element=1e-3, fixed=1.0)
    fitted = CastCost(kind="lsq int8/tensor/sym", forward=[line], backward=[Line(per_element=0, fixed=5.0)])
    settings = StepSettings(fuse=False)
    without = DeviceStep.build(graph, Plan(), made, settings)
    local = DeviceStep.build(graph, plan, made.model_copy(update={"casts": [fitted]}), settings)
    assert local.forward_seconds - without.forward_seconds == pytest.approx(1.0 + 4 * 8 * 1e-3)
    assert local.backward_seconds - without.backward_seconds == pytest.approx(5.0)
    assert DeviceStep.build(
        graph, plan, made.model_copy(update={"casts": [fitted]}), settings, casts=False
    ).seconds == (pytest.approx(without.seconds))


class IntegerKernel:
    """Runs products in integers, as a kernel's registration would say it."""

    def execution(self, operator: OperatorUnderPlan) -> Execution | None:
        if operator.call.kind != "linear" or operator.spec("weight") is None:
            return None
        return Execution("int8", (Cast("weight", "pack", weight=True),), takes="int8", gives="int8")


def test_a_kernel_is_one_registration_and_casts_stand_where_formats_change() -> None:
    """in → a (float) → relu → b (int8) → relu (inherits) → c (int8) → norm (float): one cast in, one cast out."""
    model = nn.Sequential(
        nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2)
    )
    batch = (torch.randn(4, 8), torch.randint(0, 2, (4,)))
    graph = record_step(model, batch, F.cross_entropy)
    spec = SiteSpec(format=Format.parse("int8/channel/sym"))
    plan = Plan(sites={"2:weight": spec, "4:weight": spec})
    calls = timed_sample(Variant(model=model), batch, F.cross_entropy).calls
    keys = (
        set(calls)
        | {(text, "int8") for text, _ in calls}
        | {(text.replace("f32[4,8]+", "int8[4,8]+"), f) for text, f in calls}
    )
    cast = [Line(per_element=0, fixed=1.0)]
    casts = [CastCost(kind=k, forward=cast, backward=cast) for k in ("float32→int8", "int8→float32", "pack")]
    made = profile_of(keys, forward=0.0, backward=0.0, casts=casts)
    IMPLEMENTATIONS.register("integers", IntegerKernel())
    try:
        local = DeviceStep.build(graph, plan, made, StepSettings())
    finally:
        IMPLEMENTATIONS.unregister("integers")
    found = {block.op.name: [placed.cast.kind for placed in block.casts] for block in local.blocks}
    assert found == {
        "0": [],
        "1": [],
        "2": ["pack", "float32→int8"],
        "3": [],
        "4": ["pack"],
        "5": ["int8→float32"],
        "6": [],
    }
    assert [block.gives for block in local.blocks] == [
        "float32",
        "float32",
        "int8",
        "int8",
        "int8",
        "float32",
        "float32",
    ]
    assert local.seconds == pytest.approx(2 * 4)  # each cast is a second forward and a second backward


def test_a_changed_operator_is_predicted_as_if_from_nothing() -> None:
    model, batch, loss = net()
    graph = record_step(model, batch, loss)
    plan = int8_plan(model, batch)
    settings = StepSettings(fuse=False)
    sample = timed_sample(prepared(model, batch, plan), batch, loss)
    keys = set(sample.calls) | set(timed_sample(Variant(model=model), batch, loss).calls)
    made = profile_of(keys)
    predictor = Predictor.make(graph, plan, made, None, settings)
    changed = replace(plan, sites={s: spec for s, spec in plan.sites.items() if not s.startswith("head:")})
    again = predictor.changed("device", changed, {"head"})
    fresh = Predictor.make(graph, changed, made, None, settings)
    assert again.seconds == fresh.seconds < predictor.seconds
    assert again.predict().devices[0].memory == fresh.predict().devices[0].memory
    assert predictor.seconds == Predictor.make(graph, plan, made, None, settings).seconds  # the old one is as it was


def test_a_trial_that_fails_leaves_nothing_behind() -> None:
    model, batch, loss = net()
    graph = record_step(model, batch, loss)
    made = profile_of(timed_sample(Variant(model=model), batch, loss).calls)
    predictor = Predictor.make(graph, Plan(), made, None, StepSettings())
    before = predictor.seconds
    unknown = Plan(sites={"head:input": SiteSpec(format=Format.parse("int4/tensor/sym"), quantizer="lsq")})
    for _ in range(2):
        with raises_problem("not-profiled", where="head:input"):
            predictor.changed("device", unknown, {"head"})
    assert predictor.changed("device", Plan(), {"head"}).seconds == before == predictor.seconds


@pytest.mark.parametrize("backend", ["onnxruntime", "academic"])
@pytest.mark.parametrize("strategy", [0, 1, 2, 3, 4])
def test_gradients_come_in_autograds_order(backend: str, strategy: int) -> None:
    """Buckets are made of it: a folded norm's weight comes with its convolution's."""
    model, batch, loss = net()
    graph = record_step(model, batch, loss)
    plan = int8_plan(model, batch, backend)
    folds = {norm: FoldSpec(into=fold.into, strategy=strategy) for norm, fold in plan.folds.items()}
    plan = replace(plan, fold=folds)
    variant = prepared(model, batch, plan)
    made = profile_of(
        {*timed_sample(variant, batch, loss).calls, *timed_sample(Variant(model=model), batch, loss).calls}
    )
    real: list[str] = []
    for name, parameter in variant.model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: real.append(name))
    loss(variant.model(batch[0]), batch[1]).backward()
    local = DeviceStep.build(graph, plan, made, StepSettings(fuse=False))
    assert [name for name, _ in local.trained] == real
    shapes = {name: tuple(parameter.shape) for name, parameter in variant.model.named_parameters()}
    assert all(spec.shape == shapes[name] for name, spec in local.trained)


def test_changed_plans_are_predicted_as_if_from_nothing() -> None:
    """Whatever the plans: folds come and go with their convolutions, shared quantizers with their owners."""
    model, batch, loss = digits()
    graph = record_step(model, batch, loss)
    settings = StepSettings(fuse=False)
    whole = int8_plan(model, batch)
    names = sorted({site.rpartition(":")[0] for site in whole.sites})
    keys = set(timed_sample(prepared(model, batch, whole), batch, loss).calls)
    keys |= set(timed_sample(Variant(model=model), batch, loss).calls)
    made = profile_of(sorted(keys))
    # each costs something else, so that no change hides another
    costs = [
        cost.model_copy(update={"forward": OperatorTime(seconds=1e-3 * n)}) for n, cost in enumerate(made.operators, 1)
    ]
    made = made.model_copy(update={"operators": costs})
    casts = [
        CastCost(kind=kind, forward=[Line(per_element=1e-6, fixed=1e-3)]) for _, kind in keys if kind.startswith("lsq")
    ]
    made = made.model_copy(update={"casts": casts})
    coin = random.Random(0)
    plan = whole
    predictor = Predictor.make(graph, plan, made, None, settings)
    for _ in range(25):
        now = restricted(whole, {name for name in names if coin.random() < 0.6})
        sites = {*plan.sites} ^ {*now.sites}
        predictor = predictor.changed("device", now, {site.rpartition(":")[0] for site in sites})
        fresh = Predictor.make(graph, now, made, None, settings)
        assert predictor.seconds == pytest.approx(fresh.seconds, abs=1e-12)
        assert predictor.predict().devices == fresh.predict().devices
        plan = now


def test_unknown_changed_operators_are_rejected() -> None:
    model, batch, loss = net()
    graph = record_step(model, batch, loss)
    made = profile_of(timed_sample(Variant(model=model), batch, loss).calls)
    predictor = Predictor.make(graph, Plan(), made)
    with raises_problem("unknown-operator", mentions="'head'"):
        predictor.changed("device", Plan(), {"haed"})
    with raises_problem("unknown-device-kind", mentions="'device'"):
        predictor.changed("devise", Plan(), {"head"})


def test_fp16_has_its_loss_scaled() -> None:
    model, batch, loss = net()
    graph = record_step(model, batch, loss)
    settings = StepSettings(amp="fp16")
    made = profile_of(timed_sample(Variant(model=model, settings=settings), batch, loss).calls)
    scaling = TensorsCost(name="scaling", per_element=0, per_tensor=0, fixed=1.0)
    without = DeviceStep.build(graph, Plan(), made.model_copy(), settings)
    assert without.lacks_scaling
    made = made.model_copy(update={"tensors": [*made.tensors, scaling]})
    local = DeviceStep.build(graph, Plan(), made, settings)
    assert not local.lacks_scaling
    assert local.phases["optimizer"] == pytest.approx(without.phases["optimizer"] + 1)
    clipped = DeviceStep.build(graph, Plan(), made, settings.model_copy(update={"clip": 1.0}))
    assert clipped.phases["clip"] == pytest.approx(1.0)
    assert DeviceStep.build(graph, Plan(), made, StepSettings(amp="fp16", clip=1.0)).seconds == pytest.approx(
        local.seconds
    )
