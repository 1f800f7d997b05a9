"""The folding strategies: equal when deployed, and in training each what it says."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from problems import raises_problem
from torch import Tensor, nn

from bitwright.backends import place
from bitwright.core.formats import Format
from bitwright.graph import capture
from bitwright.plan import STRATEGIES, FoldSpec, Plan, SiteSpec
from bitwright.ptq import calibrate
from bitwright.quantizers import attachment_of, prepare, quantizers_of, set_mode, strip
from bitwright.quantizers.folding import BY_STRATEGY

ALL = [0, 1, 2, 3, 4]
OF_THE_BATCH = [2, 3, 4]
FROZEN = [0, 1]
PAIRS: dict[str, tuple[Any, Any, tuple[int, ...]]] = {
    "conv1d": (nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6), (5, 4, 9)),
    "conv2d": (nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d(6), (4, 4, 6, 6)),
    "conv2d with bias": (nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), (4, 4, 6, 6)),
    "conv3d": (nn.Conv3d(2, 6, 2), nn.BatchNorm3d(6), (3, 2, 4, 4, 4)),
    "grouped": (nn.Conv2d(4, 6, 3, groups=2), nn.BatchNorm2d(6), (3, 4, 6, 6)),
    "depthwise": (nn.Conv2d(6, 6, 3, groups=6), nn.BatchNorm2d(6), (3, 6, 6, 6)),
    "transposed 1d": (nn.ConvTranspose1d(4, 6, 3), nn.BatchNorm1d(6), (3, 4, 5)),
    "transposed": (nn.ConvTranspose2d(4, 6, 3), nn.BatchNorm2d(6), (3, 4, 5, 5)),
    "grouped transposed": (nn.ConvTranspose2d(4, 6, 3, groups=2), nn.BatchNorm2d(6), (3, 4, 5, 5)),
    "transposed 3d": (nn.ConvTranspose3d(2, 6, 2), nn.BatchNorm3d(6), (3, 2, 3, 3, 3)),
    "linear": (nn.Linear(4, 6), nn.BatchNorm1d(6), (9, 4)),
    "no affine": (nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, affine=False), (3, 4, 6, 6)),
    "cumulative": (nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, momentum=None), (3, 4, 6, 6)),
    "sync": (nn.Conv2d(4, 6, 3), nn.SyncBatchNorm(6), (3, 4, 6, 6)),  # alone: as any other norm
}
pairs = pytest.mark.parametrize("pair", PAIRS)


def build(pair: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Sequential, Tensor]:
    """Operator, norm and a smooth end, with statistics and γ that aren't 0 and 1; and a batch."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    operator, norm, shape = PAIRS[pair]
    model = nn.Sequential(copy.deepcopy(operator), copy.deepcopy(norm), nn.Tanh())
    model[1].running_mean.normal_()
    model[1].running_var.uniform_(0.5, 2.0)
    if norm.affine:
        nn.init.normal_(model[1].weight)
        nn.init.normal_(model[1].bias)
    return model.to(dtype), torch.randn(shape, dtype=dtype)


def folded(model: nn.Sequential, x: Tensor, strategy: int, bits: int = 16) -> nn.Sequential:
    """A prepared copy; the weight's quantizer sees what is deployed."""
    model = copy.deepcopy(model)
    site = SiteSpec(format=Format.parse(f"int{bits}/channel/sym"))
    prepare(model, Plan(sites={"0:weight": site}, fold={"1": FoldSpec(into="0", strategy=strategy)}), inputs=x)
    calibrate(model, [x])
    return model


def without_rounding(model: nn.Sequential) -> nn.Sequential:
    """The fold alone: quantizers pass on what they get."""
    for quantizer in quantizers_of(model).values():
        quantizer.enabled = False
    return model


def distance(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm().clamp_min(1e-30)).item()


def step(model: nn.Module, x: Tensor) -> Tensor:
    """One forward and backward with a loss that weighs every output differently."""
    out: Tensor = model(x)
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)).sum().backward()
    return out


def test_plan_and_attach_know_the_same_strategies() -> None:
    assert list(STRATEGIES) == list(BY_STRATEGY) == ALL


@pairs
def test_all_strategies_deploy_the_same(pair: str) -> None:
    model, x = build(pair, torch.float32)
    model.eval()
    fine = [folded(model, x, strategy)(x) for strategy in ALL]
    assert len(fine) > 1
    for out in fine[1:]:
        assert torch.equal(out, fine[0])
    for strategy in ALL:
        assert distance(without_rounding(folded(model, x, strategy))(x), model(x)) <= 1e-5


@pairs
@pytest.mark.parametrize("strategy", OF_THE_BATCH)
def test_training_is_that_of_the_float_model(pair: str, strategy: int) -> None:
    model, x = build(pair)
    ours = without_rounding(folded(model, x, strategy)).train()
    model.train()
    for batch in (x, x * 1.5 + 0.3, x.flip(0) - 0.2):
        theirs_in, ours_in = batch.clone().requires_grad_(), batch.clone().requires_grad_()
        model.zero_grad()
        ours.zero_grad()
        assert distance(step(ours, ours_in), step(model, theirs_in)) <= 1e-12
        assert ours_in.grad is not None
        assert theirs_in.grad is not None
        assert distance(ours_in.grad, theirs_in.grad) <= 1e-10
        for name, parameter in model.named_parameters():
            grad = ours.get_parameter(name).grad
            assert grad is not None, name
            assert parameter.grad is not None, name
            if name == "0.bias":  # the norm takes it out again: both are zero but for rounding
                assert grad.abs().max() <= 1e-10
            else:
                assert distance(grad, parameter.grad) <= 1e-10, name
        for name, statistic in model[1].named_buffers():
            assert distance(ours[1].get_buffer(name).double(), statistic.double()) <= 1e-12, name


@pairs
@pytest.mark.parametrize("strategy", FROZEN)
def test_frozen_statistics_do_not_change(pair: str, strategy: int) -> None:
    model, x = build(pair)
    ours = without_rounding(folded(model, x, strategy)).train()
    before = {name: buffer.clone() for name, buffer in ours[1].named_buffers()}
    deployed = copy.deepcopy(ours).eval()(x)
    for _ in range(3):
        assert torch.equal(step(ours, x), deployed)
    for name, statistic in ours[1].named_buffers():
        assert torch.equal(statistic, before[name]), name
    # the float model with a norm that is in eval mode has these gradients
    model.train()
    model[1].eval()
    ours.zero_grad()
    step(ours, x)
    step(model, x)
    for name, parameter in model.named_parameters():
        grad = ours.get_parameter(name).grad
        if strategy == 0 and name.startswith("1."):
            assert grad is None, name
        else:
            assert grad is not None, name
            assert parameter.grad is not None
            assert distance(grad, parameter.grad) <= 1e-10, name


def test_strategy_0_freezes_the_norm_until_it_is_stripped() -> None:
    model, x = build("conv2d with bias", torch.float32)
    model[1].bias.requires_grad_(False)
    ours = folded(model, x, 0).train()
    assert not any(p.requires_grad for p in ours[1].parameters())
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1, weight_decay=0.1)
    before = copy.deepcopy(ours.state_dict())
    step(ours, x)
    optimizer.step()
    for key, value in ours.state_dict().items():
        assert torch.equal(value, before[key]) == (not key.startswith("0.")), key
    copied = strip(copy.deepcopy(ours))
    strip(ours)
    for stripped in (ours, copied):
        assert stripped[1].weight.requires_grad
        assert not stripped[1].bias.requires_grad


@pytest.mark.parametrize("strategy", OF_THE_BATCH)
def test_what_is_rounded_in_training(strategy: int) -> None:
    model, x = build("conv2d", torch.float32)
    ours = folded(model, x, strategy).train()
    norm = model[1]
    seen: list[Tensor] = []
    quantizers_of(ours)["0:weight"].tap = lambda site, quantizer, tensor: seen.append(tensor)
    variance = model[0](x).var((0, 2, 3), correction=0) if strategy == 2 else norm.running_var
    ours(x)
    expected = model[0].weight * (norm.weight / torch.sqrt(variance + norm.eps))[:, None, None, None]
    assert torch.allclose(seen[0], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("strategy", ALL)
def test_a_dead_channel_and_a_constant_one_stay_finite(strategy: int) -> None:
    model, x = build("conv2d with bias", torch.float32)
    with torch.no_grad():
        model[1].weight[2] = 0.0
        model[0].weight[3] = 0.0
    ours = folded(model, x, strategy, bits=4).train()
    assert torch.isfinite(step(ours, x)).all()
    assert all(torch.isfinite(p.grad).all() for p in ours.parameters() if p.grad is not None)
    assert torch.isfinite(ours.eval()(x)).all()


@pytest.mark.parametrize("strategy", ALL)
def test_channels_last(strategy: int) -> None:
    model, x = build("conv2d with bias")
    usual = without_rounding(folded(model, x, strategy)).train()
    ours = copy.deepcopy(usual).to(memory_format=torch.channels_last)
    last = x.to(memory_format=torch.channels_last)
    out = step(ours, last)
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert distance(out, step(usual, x)) <= 1e-12
    for name, parameter in usual.named_parameters():
        grad = ours.get_parameter(name).grad
        assert (grad is None) == (parameter.grad is None)
        if grad is not None and parameter.grad is not None:
            assert (grad - parameter.grad).norm() <= 1e-10 * max(1.0, parameter.grad.norm().item()), name
    for name, statistic in usual[1].named_buffers():
        assert distance(ours[1].get_buffer(name).double(), statistic.double()) <= 1e-12
    assert distance(ours.eval()(last), usual.eval()(x)) <= 1e-12


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("strategy", ALL)
@pytest.mark.parametrize("pair", ["conv2d with bias", "cumulative"])
def test_compiled_training(strategy: int, pair: str) -> None:
    model, x = build(pair, torch.float32)
    eager = folded(model, x, strategy, bits=8).train()
    twin = copy.deepcopy(eager)
    torch._dynamo.reset()
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        eager.zero_grad()
        twin.zero_grad()
        assert torch.allclose(step(compiled, x), step(eager, x), atol=1e-5)
        for name, parameter in eager.named_parameters():
            grad = twin.get_parameter(name).grad
            assert (grad is None) == (parameter.grad is None), name
            if grad is not None and parameter.grad is not None:
                assert torch.allclose(grad, parameter.grad, rtol=1e-4, atol=1e-4), name
        for name, statistic in eager[1].named_buffers():
            assert torch.allclose(twin[1].get_buffer(name), statistic, atol=1e-5), name


@pytest.mark.parametrize("strategy", ALL)
@pytest.mark.parametrize("autocast", [False, True])
def test_low_precision(strategy: int, autocast: bool) -> None:
    model, x = build("conv2d with bias", torch.float32)
    ours = folded(model, x, strategy, bits=8).train()
    reference = copy.deepcopy(ours)(x)
    if autocast:
        with torch.autocast("cpu", torch.bfloat16):
            out = step(ours, x)
        assert ours[1].running_var.dtype == torch.float32
    else:
        out = step(ours.to(torch.bfloat16), x.bfloat16())
        assert out.dtype == torch.bfloat16
    assert distance(out.float(), reference) <= 0.03
    assert all(torch.isfinite(p.grad).all() for p in ours.parameters() if p.grad is not None)


@pytest.mark.parametrize("strategy", ALL)
def test_a_norm_in_eval_mode_runs_as_deployed(strategy: int) -> None:
    model, x = build("conv2d")
    ours = folded(model, x, strategy).eval()
    deployed = ours(x)
    ours.train()
    ours[1].eval()
    before = copy.deepcopy(ours[1].state_dict())
    assert torch.equal(ours(x), deployed)
    assert all(torch.equal(value, before[key]) for key, value in ours[1].state_dict().items())


@pytest.mark.parametrize("strategy", ALL)
def test_state_dict_keys_copies_and_float_mode(strategy: int) -> None:
    model, x = build("conv2d", torch.float32)
    ours = folded(model, x, strategy)
    assert [key for key in ours.state_dict() if not key.startswith("bitwright.")] == list(model.state_dict())
    again = pickle.loads(pickle.dumps(ours)).train()
    assert torch.equal(again(x), copy.deepcopy(ours).train()(x))
    ours.load_state_dict(model.state_dict())  # a float checkpoint loads strictly
    set_mode(ours, "float")
    assert torch.equal(ours.train()(x), model.train()(x))
    assert torch.equal(ours[1].running_var, model[1].running_var)
    assert strip(ours).state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize("strategy", [2, 3])
def test_one_value_per_channel_has_no_statistics(strategy: int) -> None:
    model, x = build("linear")
    ours = folded(model, x, strategy).train()
    with raises_problem("batch-too-small"):
        ours(x[:1])


def test_an_unknown_strategy_is_found_before_anything_happens() -> None:
    model, x = build("conv2d")
    site = SiteSpec(format=Format.parse("int8/channel/sym"))
    plan = Plan(sites={"0:weight": site}, fold={"1": FoldSpec(into="0", strategy=7)})
    for options in ({}, {"inputs": x}):
        with raises_problem("unknown-folding-strategy", where="fold.1", mentions="4 (folded"):
            prepare(model, plan, **options)
    assert "forward" not in model.__dict__


# torch's own SyncBatchNorm doesn't train on a CPU
@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair != "sync"])
def test_a_norm_that_is_not_folded_trains_as_it_is(pair: str) -> None:
    model, x = build(pair)
    plan = Plan(sites={"0:weight": SiteSpec(format=Format.parse("int8/channel/sym"))})
    ours = prepare(copy.deepcopy(model), plan)
    calibrate(ours, [x])
    without_rounding(ours).train()
    model.train()
    for batch in (x, x * 1.5 + 0.3):
        model.zero_grad()
        ours.zero_grad()
        assert torch.equal(step(ours, batch), step(model, batch))
    for name, parameter in model.named_parameters():
        grad = ours.get_parameter(name).grad
        assert grad is not None, name
        assert parameter.grad is not None, name
        assert torch.equal(grad, parameter.grad), name
    for name, statistic in model[1].named_buffers():
        assert torch.equal(ours[1].get_buffer(name), statistic), name


def test_training_without_folding_learns_and_deploys_norm_and_rounded_weight() -> None:
    model, x = build("conv2d with bias", torch.float32)
    target = torch.tanh(torch.randn(4, 6, 4, 4))
    plan = place(capture(model, x), "onnxruntime", weights="int4/channel/sym", fold=-1)
    assert not plan.fold
    ours = prepare(copy.deepcopy(model), plan)
    calibrate(ours, [x])
    ours.train()
    before = copy.deepcopy(ours.state_dict())
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    losses = []
    for _ in range(40):
        loss = nn.functional.mse_loss(ours(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    for key in ("0.weight", "1.weight", "1.bias", "1.running_mean", "1.running_var"):
        assert not torch.equal(ours.state_dict()[key], before[key]), key
    ours.eval()
    sites = quantizers_of(ours)
    weight = sites["0:weight"](ours[0].weight)  # the weight itself is rounded, not w·γ/σ
    convolved = nn.functional.conv2d(sites["0:input"](x), weight, ours[0].bias)
    expected = nn.functional.batch_norm(
        convolved, ours[1].running_mean, ours[1].running_var, ours[1].weight, ours[1].bias, eps=ours[1].eps
    )
    assert sites.keys() == {"0:weight", "0:input", "0:bias", "1:output"}
    sites["0:bias"].enabled = False  # a bias on its int32 grid: as good as float
    assert torch.equal(ours(x), torch.tanh(sites["1:output"](expected)))


def test_a_synchronised_norm_always_synchronises() -> None:
    model, x = build("sync", torch.float32)
    (fold,) = attachment_of(folded(model, x, 2)).folds.values()
    assert fold.sync
    (fold,) = attachment_of(folded(build("conv2d", torch.float32)[0], x, 2)).folds.values()
    assert not fold.sync
