from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from step_cases import bert, digits, int8_plan, net, prepared, timed_sample
from torch import Tensor

from bitwright import capture, prepare
from bitwright.cluster import predict_step
from bitwright.plan import ComputeSpec, Plan
from bitwright.profiling import SampleStore, StepSettings, Variant, record_step
from bitwright.profiling.device_profile import DeviceProfile, MemoryFacts, TensorsCost
from bitwright.training.step import autocast


def truth(variant: Variant, batch: Any) -> int:
    """What backward keeps of the model's forward, by torch's own hooks."""
    model = variant.model.train()
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    seen: dict[int, int] = {}
    alive = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast(variant.settings.amp):
        inputs = batch[0]
        alive.append(model(**inputs) if isinstance(inputs, dict) else model(inputs))
    return sum(seen.values())


def measured(*variants: Variant, batch: Any, loss: Any) -> DeviceProfile:
    store = SampleStore()
    for variant in variants:
        store.add_saved(timed_sample(variant, batch, loss, saving=True))
        store.add_round(timed_sample(variant, batch, loss), wanted=9)
    free = [TensorsCost(name=name, per_element=0, per_tensor=0) for name in ("sgd/loop", "adamw/loop", "zero_grad")]
    costs = list(store.costs().values())
    return DeviceProfile(bitwright_profile=1, device="here", operators=costs, tensors=free)


@pytest.mark.parametrize("make", [net, digits, bert])
@pytest.mark.parametrize("backend", ["onnxruntime", "academic"])
def test_saved_bytes_are_those_of_saved_tensors_hooks(make, backend) -> None:  # type: ignore[no-untyped-def]
    """Float, uniform INT8, and a plan that was never run: the first half of the operators in INT8."""
    model, batch, loss = make()
    graph = record_step(model, batch, loss)
    plan = int8_plan(model, batch, backend)
    settings = StepSettings(fuse=False)
    float_, int8 = Variant(model=model, settings=settings), prepared(model, batch, plan)
    profile = measured(float_, int8, batch=batch, loss=loss)
    first = {op.name for op in graph.ops[: len(graph.ops) // 2]}
    sites = {site: spec for site, spec in plan.sites.items() if site.rpartition(":")[0] in first}
    folds = {norm: fold for norm, fold in plan.folds.items() if fold.into in first}
    mixed = replace(plan, sites=sites, fold=folds)
    for variant in (float_, int8, prepared(model, batch, mixed)):
        use = predict_step(graph, variant.plan, profile, settings=settings).devices[0].memory
        assert use is not None
        assert use.saved == pytest.approx(truth(variant, batch), rel=0.05)
        assert use.peak > use.saved + use.weights + use.optimizer


def test_optimizers_gradients_and_buckets() -> None:
    model, batch, loss = net()
    graph = record_step(model, batch, loss)
    profile = measured(Variant(model=model), batch=batch, loss=loss)
    weights = sum(p.numel() * 4 for p in model.parameters())
    sgd = predict_step(graph, Plan(), profile).devices[0].memory
    adamw = predict_step(graph, Plan(), profile, settings=StepSettings(optimizer="adamw")).devices[0].memory
    assert sgd is not None
    assert adamw is not None
    assert (sgd.weights, sgd.gradients, sgd.optimizer, sgd.buckets) == (weights, weights, weights, 0)
    assert adamw.peak == sgd.peak + weights
    assert "ward" in sgd.cause


@pytest.mark.parametrize(("format", "compiler"), [("int8", True), ("bf16", False)])
def test_a_process_that_compiles_arithmetic_has_the_compiler_in_memory(format: str, compiler: bool) -> None:
    """Quantizers and int8 kernels made a process about 100 MB larger than it was said to be."""
    model, batch, loss = net()
    graph = record_step(model, batch, loss)
    plan = Plan(compute={"*": ComputeSpec(format=format)}).resolve(capture(model, batch[0]))
    low = Variant(model=prepare(copy.deepcopy(model), plan, inputs=batch[0]), plan=plan)
    profile = measured(Variant(model=model), low, batch=batch, loss=loss)
    facts = MemoryFacts(process=1 << 20, compiler=1 << 30)
    profile = profile.model_copy(update={"memory": facts})
    for own, expected in ((Plan(), False), (plan, compiler)):
        use = predict_step(graph, own, profile).devices[0].memory
        assert use is not None
        assert use.process == use.peak + facts.process + (facts.compiler if expected else 0)


def test_a_copied_profile_finds_its_own_costs() -> None:
    profile = DeviceProfile(bitwright_profile=1, device="here", tensors=[])
    assert not profile.by_name
    cost = TensorsCost(name="clip", per_element=0, per_tensor=0)
    assert profile.model_copy(update={"tensors": [cost]}).by_name == {"clip": cost}
