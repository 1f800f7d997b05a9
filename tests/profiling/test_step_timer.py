from __future__ import annotations

from itertools import count

import pytest
import torch
from step_cases import Net, bert, digits, int8_plan, net, prepared, timed_sample

from bitwright.cluster.device_step import DeviceStep
from bitwright.plan import Plan
from bitwright.profiling import StepSettings, Variant, record_step
from bitwright.profiling.device_profile import DeviceProfile, Host, OperatorCost, OperatorTime, TensorsCost
from bitwright.profiling.profiled_step import CLOCKS, TimedStep
from bitwright.profiling.profiler import assemble
from bitwright.profiling.sample_store import SampleStore
from bitwright.profiling.step_timer import ACCUMULATE, Sample, StepTimer, timer_overhead


def profile_of_sample(sample: Sample) -> DeviceProfile:
    free = [TensorsCost(name=name, per_element=0, per_tensor=0) for name in ("sgd/loop", "zero_grad")]
    costs = [OperatorCost(operator=key[0], format=key[1], forward=OperatorTime(seconds=1)) for key in sample.calls]
    return DeviceProfile(bitwright_profile=1, device="seen", operators=costs, tensors=free)


@pytest.mark.parametrize("make", [net, digits, bert])
@pytest.mark.parametrize("backend", [None, "onnxruntime", "academic"])
@pytest.mark.parametrize("amp", [None, "bf16"])
def test_measured_keys_are_the_requested_keys(make, backend, amp) -> None:  # type: ignore[no-untyped-def]
    """Predicting looks up the very texts that watching has written down: no operator, cast or loss is missing."""
    model, batch, loss = make()
    settings = StepSettings(fuse=False, amp=amp)
    graph = record_step(model, batch, loss)
    if backend is None:
        variant = Variant(model=model, settings=settings)
    else:
        variant = prepared(model, batch, int8_plan(model, batch, backend), settings)
    sample = timed_sample(variant, batch, loss)
    local = DeviceStep.build(graph, variant.plan, profile_of_sample(sample), settings)
    assert not local.costs.stood_in
    seen = sum(n for (_, format), n in sample.calls.items() if format != ACCUMULATE)
    assert seen == len(local.blocks) + sum(len(block.casts) for block in local.blocks) + 1


def test_parts_add_up_to_the_whole() -> None:
    """With a clock that ticks at each look, backward's parts are all ticks between its start and its end."""
    model, batch, loss = net()
    ticks = count()
    step = TimedStep(model.train(), [batch], loss, StepSettings())
    timer = StepTimer(model, Plan(), StepSettings(), lambda: float(next(ticks)))
    sample = timer.run(step)
    assert sample.nodes > len(sample.backward) > 5
    assert sum(sample.backward.values()) == sample.nodes
    assert sample.engine == 1


def test_backward_of_an_operator_is_not_its_quantizers() -> None:
    """The output's quantizer comes last: what is behind it in autograd's graph is the operator's."""
    model, batch, loss = bert()
    sample = timed_sample(prepared(model, batch, int8_plan(model, batch)), batch, loss)
    attention = [key for key in sample.calls if key[0].startswith("scaled_dot_product_attention")]
    assert attention
    assert all(sample.backward[key] > 0 for key in attention)


def test_timing_does_not_change_results() -> None:
    model, batch, loss = net()
    variant = prepared(model, batch, int8_plan(model, batch))

    def gradients(watching: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        for module in variant.model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.reset_running_stats()
        step = TimedStep(variant.model, [batch], loss, variant.settings)
        for group in step.optimizer.param_groups:
            group["lr"] = 0.0
        if watching:
            StepTimer(variant.model, variant.plan, variant.settings, lambda: 0.0).run(step, saving=True)
        else:
            step()
        return [p.grad.clone() for p in variant.model.parameters() if p.grad is not None]

    before = {name: dict(vars(module)) for name, module in variant.model.named_modules()}
    plain, seen = gradients(False), gradients(True)
    assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))
    assert {name: vars(module).keys() for name, module in variant.model.named_modules()} == {
        name: attributes.keys() for name, attributes in before.items()
    }


def test_recording_leaves_the_model_unchanged() -> None:
    model, batch, loss = net()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    graph = record_step(model, batch, loss)
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters() if p.grad is not None)
    assert isinstance(model, Net)
    assert "forward" not in vars(model)
    assert set(graph.gradient_order) == set(graph.parameters)
    assert type(graph).from_json(graph.to_json()) == graph


@pytest.mark.parametrize("backend", [None, "onnxruntime"])
@pytest.mark.parametrize("share", [0.8, 1.1])
def test_a_predicted_step_matches_the_plain_step(backend: str | None, share: float) -> None:
    """Watching takes time: what operators are said to cost must add up to what a step takes that nobody watches."""
    model, batch, loss = bert()
    settings = StepSettings(fuse=False)
    graph = record_step(model, batch, loss)
    plan = Plan() if backend is None else int8_plan(model, batch, backend)
    variant = Variant(model=model) if backend is None else prepared(model, batch, plan, settings)
    host = Host(gap=2e-6, prepared_gap=3e-6, seen=1e-6, hooked=2e-6, engine=1e-5, engine_operator=1e-7)
    step = TimedStep(variant.model.train(), [batch], loss, settings)
    timer = StepTimer(variant.model, plan, settings, CLOCKS["wall"], host=host)
    sample = timer.run(step)
    shown = sum(t for (text, _), t in sample.forward.items() if not text.startswith("loss:"))
    plain = {"forward": share * shown, "loss": 1e-4, "backward": share * sum(sample.backward.values())}
    store = SampleStore()
    store.add({"facts": {"host": host.model_dump()}})
    store.add({"facts": {"tensors": [cost.model_dump() for cost in profile_of_sample(sample).tensors]}})
    store.add_round(sample, wanted=1, overhead=timer_overhead(timer, sample, plain))
    phases = DeviceStep.build(graph, plan, assemble(store, "wall"), settings).phases
    # operators that take less than their share of what is taken off stay at nothing
    assert {name: phases[name] for name in plain} == pytest.approx(plain, rel=0.05)
