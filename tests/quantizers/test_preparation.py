"""prepare() and strip(): the model stays what it is."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from problems import raises_problem
from torch import Tensor, nn
from torch.overrides import has_torch_function

from bitwright.core.errors import BitwrightError, PlanError, UncalibratedError
from bitwright.core.formats import Format
from bitwright.graph import capture
from bitwright.plan import Plan, SiteSpec
from bitwright.ptq import calibrate
from bitwright.quantizers import CONTAINER, prepare, quantizers_of, set_mode, strip


def spec(text: str, **options: Any) -> SiteSpec:
    return SiteSpec(format=Format.parse(text), **options)


def grads(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    model(x).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_class_signature_and_float_keys_stay(any_model: nn.Module, zoo: SimpleNamespace) -> None:
    before = (type(any_model), inspect.signature(any_model.forward), list(any_model.state_dict()))
    parameters = dict(any_model.named_parameters())
    zoo.quantized(any_model)
    after = any_model.state_dict()
    assert quantizers_of(any_model)
    assert type(any_model) is before[0]
    assert inspect.signature(any_model.forward) == before[1]
    assert [key for key in after if not key.startswith(f"{CONTAINER}.")] == before[2]
    assert all(parameters[name] is p for name, p in any_model.named_parameters() if name in parameters)


def test_prepared_model_really_quantizes(any_model: nn.Module, zoo: SimpleNamespace) -> None:
    x = zoo.example(any_model)
    plain = any_model(x)
    zoo.quantized(any_model, "academic", weights="int3/tensor/sym", first_last_bits=3)
    error = (any_model(x) - plain).norm() / plain.norm()
    assert 0.01 < error < 2.0


def test_float_checkpoint_loads_strictly(any_model: nn.Module, zoo: SimpleNamespace) -> None:
    other = zoo.seeded(type(any_model), seed=5)
    prepared = zoo.quantized(copy.deepcopy(other))
    fresh = prepare(copy.deepcopy(other), zoo.plan_for(other))
    assert list(any_model.parameters())
    for model in (prepared, fresh):  # with and without quantizer state of its own
        model.load_state_dict(any_model.state_dict(), strict=True)
        for name, parameter in any_model.named_parameters():
            assert torch.equal(dict(model.named_parameters())[name], parameter)


FORMATS = ["int8/tensor/sym", "int8/channel/sym", "uint8/channel/asym", "int4/group2/sym"]


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("quantizer", ["plain", "lsq"])
def test_prepared_checkpoint_reloads_bit_exact(weights: str, quantizer: str, zoo: SimpleNamespace) -> None:
    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).eval()

    plan = Plan(
        sites={
            **{f"{n}:weight": spec(weights, quantizer=quantizer) for n in (0, 2)},
            **{f"{n}:input": spec("int8/tensor/sym/adasign", quantizer=quantizer) for n in (0, 2)},
        }
    )
    x = torch.randn(9, 6)
    model = prepare(build(0), plan)
    calibrate(model, [x])
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh = prepare(build(1), plan)
    with pytest.raises(UncalibratedError):
        fresh(x)
    fresh.load_state_dict(torch.load(file, weights_only=True), strict=True)
    assert same(fresh.state_dict(), model.state_dict())
    assert torch.equal(fresh(x), model(x))
    assert quantizers_of(fresh)["2:input"].qmin == 0  # the sign that calibration chose
    assert same(grads(fresh, x), grads(model, x))


def test_checkpoint_of_one_quantizer_missing_is_an_error(zoo: SimpleNamespace) -> None:
    model = zoo.quantized(zoo.seeded(zoo.Residual))
    state = model.state_dict()
    del state[f"{CONTAINER}.conv1:weight.zero_point"]
    with pytest.raises(PlanError) as caught:
        model.load_state_dict(state)
    assert caught.value.codes == ["state-incomplete"]
    assert [problem.where for problem in caught.value.problems] == ["conv1:weight"]


def twin_by_pickle(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("twin_of", [copy.deepcopy, twin_by_pickle], ids=["deepcopy", "pickle"])
def test_copies_are_equal_and_independent(any_model: nn.Module, twin_of: Any, zoo: SimpleNamespace) -> None:
    x = zoo.example(any_model)
    model = zoo.quantized(any_model)
    expected = model(x)
    twin = twin_of(model)
    assert torch.equal(twin(x), expected)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    set_mode(twin, "float")
    assert torch.equal(model(x), expected)
    strip(twin)
    assert torch.equal(model(x), expected)
    for name, quantizer in quantizers_of(model).items():
        quantizer.scale.data.mul_(1.5)
        assert torch.isfinite(quantizer.scale).all(), name
    assert not torch.equal(model(x), expected)


def test_two_prepared_models_do_not_affect_each_other(zoo: SimpleNamespace) -> None:
    first = zoo.seeded(zoo.Residual).eval()
    second = zoo.seeded(zoo.Residual).eval()
    x = zoo.example(first)
    plain = second(x)
    zoo.quantized(first)
    assert torch.equal(second(x), plain)
    zoo.quantized(second, weights="int4/channel/sym")
    coarse = second(x)
    fine = first(x)
    assert not torch.equal(fine, coarse)
    strip(first)
    assert torch.equal(first(x), plain)
    assert torch.equal(second(x), coarse)


def test_prepared_model_inside_another_prepared_model() -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    outer = nn.Sequential(inner, nn.Linear(4, 2)).eval()
    x = torch.randn(16, 4)
    prepare(inner, Plan(sites={"0:weight": spec("int3/tensor/sym")}))
    calibrate(inner, [x])
    expected = outer[1](inner(x))
    prepare(outer, Plan(sites={"1:weight": spec("int3/tensor/sym")}))
    calibrate(outer, [x])
    weight = outer[1].weight
    codes = quantizers_of(outer)["1:weight"].integers(weight)
    rounded = codes * quantizers_of(outer)["1:weight"].scale
    assert torch.equal(outer(x), nn.functional.linear(inner(x), rounded, outer[1].bias))
    strip(outer)
    assert torch.equal(outer(x), expected)


def snapshot(model: nn.Module) -> dict[str, Any]:
    return {
        path: (set(module.__dict__), list(module._modules), module.training) for path, module in model.named_modules()
    }


@pytest.mark.parametrize("training", [False, True])
def test_strip_gives_the_original_back(any_model: nn.Module, training: bool, zoo: SimpleNamespace) -> None:
    any_model.train(training)
    x = zoo.example(any_model)
    original = copy.deepcopy(any_model)
    before = snapshot(any_model)
    zoo.quantized(any_model)
    assert strip(any_model) is any_model
    assert snapshot(any_model) == before
    assert same(any_model.state_dict(), original.state_dict())
    assert torch.equal(any_model(x), original(x))
    assert same(grads(any_model, x), grads(original, x))
    assert strip(any_model) is any_model  # nothing to take off: nothing happens


def test_strip_restores_a_replaced_forward(zoo: SimpleNamespace) -> None:
    model = zoo.seeded(zoo.Functional)
    x = zoo.example(model)
    model.forward = lambda x: type(model).forward(model, x) + 1.0
    override = model.forward
    expected = model(x)
    prepare(model, Plan(sites={"/linear#0:weight": spec("int2/tensor/sym")}))
    calibrate(model, [x])
    assert not torch.equal(model(x), expected)
    assert (model(x) - expected).abs().max() < 3.0  # the override is still at work
    strip(model)
    assert model.forward is override
    assert torch.equal(model(x), expected)


def test_all_float_plan_is_no_plan(any_model: nn.Module, zoo: SimpleNamespace) -> None:
    x = zoo.example(any_model)
    original = copy.deepcopy(any_model)
    graph = capture(any_model, x)
    before = snapshot(any_model)
    for plan in (Plan(), Plan(sites={name: SiteSpec() for name, _, _ in graph.sites()})):
        prepare(any_model, plan, graph=graph)
        assert snapshot(any_model) == before
        assert torch.equal(any_model(x), original(x))
        assert same(grads(any_model, x), grads(original, x))


@pytest.mark.parametrize("training", [False, True])
def test_float_mode_is_bit_identical(any_model: nn.Module, training: bool, zoo: SimpleNamespace) -> None:
    original = copy.deepcopy(any_model)
    zoo.quantized(any_model)
    x = zoo.example(any_model)
    set_mode(any_model, "float")
    original.train(training)
    any_model.train(training)
    assert torch.equal(any_model(x), original(x))
    assert same(grads(any_model, x), grads(original, x))
    set_mode(any_model, "quantize")
    assert not torch.equal(any_model(x), original(x))


def test_unknown_mode_is_refused(zoo: SimpleNamespace) -> None:
    model = zoo.quantized(zoo.seeded(zoo.Functional))
    with raises_problem("unknown-mode", mentions="'quantize'"):
        set_mode(model, "quantise")  # type: ignore[arg-type]
    with raises_problem("not-prepared"):
        set_mode(strip(model), "float")


def test_sequential_root_runs_its_own_children_only() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU()).eval()
    x = torch.randn(7, 4)
    expected = model(x)
    prepare(model, Plan(sites={"0:weight": spec("int16/channel/sym")}))
    calibrate(model, [x])
    assert torch.allclose(model(x), expected, atol=1e-3)
    assert strip(model)(x).equal(expected)


def test_submodule_on_its_own_is_quantized(zoo: SimpleNamespace) -> None:
    model = zoo.seeded(zoo.Attention).eval()
    plain = copy.deepcopy(model.out)
    prepare(model, Plan(sites={"out:input": spec("uint4/tensor/asym"), "out:weight": spec("int3/tensor/sym")}))
    calibrate(model, [zoo.example(model)])
    x = torch.randn(4, 8)
    q = quantizers_of(model)
    by_hand = nn.functional.linear(q["out:input"](x), q["out:weight"](model.out.weight), model.out.bias)
    assert torch.equal(model.out(x), by_hand)
    assert not torch.equal(model.out(x), plain(x))


def test_an_exception_in_forward_leaves_no_state(zoo: SimpleNamespace) -> None:
    model = zoo.quantized(zoo.seeded(zoo.Attention).eval())
    x = zoo.example(model)
    expected = model(x)
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 5, 7))
    assert torch.equal(model(x), expected)
    assert not has_torch_function((x,))  # no mode is left on
    assert strip(model)(x).shape == expected.shape


def test_two_threads_are_refused_instead_of_silently_float() -> None:
    inside, go_on = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor, wait: bool = False) -> Tensor:
            if wait:
                inside.set()
                go_on.wait(20)
            return self.linear(x)

    model = prepare(Waits(), Plan(sites={"linear:weight": spec("int4/tensor/sym")}))
    x = torch.randn(2, 3)
    calibrate(model, [x])
    expected = model(x)
    results: list[Tensor] = []
    thread = threading.Thread(target=lambda: results.append(model(x, wait=True)))
    thread.start()
    assert inside.wait(20)
    try:
        with raises_problem("used-in-another-thread"):
            model(x)
    finally:
        go_on.set()
        thread.join(20)
    assert torch.equal(results[0], expected)
    assert torch.equal(model(x), expected)


def test_uncalibrated_quantizer_names_its_site(zoo: SimpleNamespace) -> None:
    model = zoo.seeded(zoo.Residual)
    prepare(model, Plan(sites={"conv2:input": spec("uint8/tensor/asym")}))
    with raises_problem("uncalibrated", where="conv2:input", kind=UncalibratedError):
        model(zoo.example(model))


def test_prepare_twice_is_refused(zoo: SimpleNamespace) -> None:
    model = zoo.seeded(zoo.Residual)
    plan = zoo.plan_for(model)
    prepare(model, plan)
    with pytest.raises(BitwrightError) as raised:
        prepare(model, plan)
    assert raised.value.codes == ["already-prepared"]
    prepare(strip(model), plan)


def test_a_model_with_a_child_of_our_name_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.add_module(CONTAINER, nn.ReLU())
    with pytest.raises(BitwrightError) as raised:
        prepare(model, Plan(sites={"0:weight": spec("int8/tensor/sym")}))
    assert raised.value.codes == ["name-in-use"]
    assert isinstance(model.get_submodule(CONTAINER), nn.ReLU)


def test_patterns_need_a_graph(zoo: SimpleNamespace) -> None:
    model = zoo.seeded(zoo.Residual)
    plan = Plan(sites={"conv*:weight": spec("int8/channel/sym")})
    with raises_problem("unresolved-patterns"):
        prepare(model, plan)
    prepare(model, plan, inputs=zoo.example(model))
    assert set(quantizers_of(model)) == {"conv1:weight", "conv2:weight"}


def test_all_problems_at_once(zoo: SimpleNamespace) -> None:
    model = zoo.seeded(zoo.Residual)
    before = snapshot(model)
    plan = Plan(
        sites={
            "conv1:weight": spec("int8/channel/sym"),
            "konv2:weight": spec("int8/channel/sym"),
            "conv1:input": spec("int8/tensor/sym", observer="minmaxx"),
            "conv2:input": spec("int8/tensor/sym", quantizer="plan"),
            "conv2:weight": spec("int8/tensor/sym", quantizer_options={"colour": 1}),
            "head:weight": spec("fp8e4m3"),
            "not a site": spec("int8/tensor/sym"),
        },
        fold={"head": "conv1"},
    )
    with pytest.raises(PlanError) as caught:
        prepare(model, plan)
    text = str(caught.value)
    assert len(caught.value.problems) == 7
    for part in ("'conv2'", "'minmax'", "'plain'", "colour", "fp8e4m3", "not a site", "batch norm"):
        assert part in text
    assert snapshot(model) == before


def test_sites_that_the_graph_does_not_have(zoo: SimpleNamespace) -> None:
    model = zoo.seeded(zoo.Residual)
    plan = Plan(
        sites={
            "conv1:inputs": spec("int8/tensor/sym"),
            "/add#7:input0": spec("int8/tensor/sym"),
            "*lstm*": spec("int8/tensor/sym"),
        }
    )
    with pytest.raises(PlanError) as caught:
        prepare(model, plan, inputs=zoo.example(model))
    assert len(caught.value.problems) == 3
    assert "did you mean 'conv1:input'" in str(caught.value)


def test_groups_that_do_not_divide_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(6, 4))
    prepare(model, Plan(sites={"0:weight": spec("int4/group4/sym")}))
    with raises_problem("group-size", where="0:weight", mentions="group size 4"):
        calibrate(model, [torch.randn(2, 6)])
