"""Batch norms folded on the fly: deployed arithmetic in eval mode, the float statistics in training."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitwright.backends import place
from bitwright.core.formats import Format
from bitwright.graph import capture
from bitwright.plan import Plan, SiteSpec
from bitwright.ptq import calibrate
from bitwright.quantizers import prepare, quantizers_of

FINE = {"weights": "int16/channel/sym", "activations": "uint16/tensor/asym"}


def weights_only(model: nn.Module, zoo: SimpleNamespace) -> None:
    """Folded and quantized finely; activations stay float, as a batch's may leave the range of eval mode."""
    plan = zoo.plan_for(model, **FINE)
    prepare(model, replace(plan, sites={s: spec for s, spec in plan.sites.items() if s.endswith(":weight")}))
    calibrate(model, [zoo.example(model)])


def relative(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("bias", [False, True])
def test_folded_output_is_the_float_one(bias: bool, zoo: SimpleNamespace) -> None:
    model = zoo.seeded(lambda: zoo.Residual(bias)).eval()
    original = copy.deepcopy(model)
    x = zoo.example(model)
    plan = zoo.plan_for(model, **FINE)
    assert dict(plan.fold) == {"bn1": "conv1", "bn2": "conv2"}
    zoo.quantized(model, **FINE)
    assert relative(model(x), original(x)) <= 1e-3
    for (name, ours), theirs in zip(model.named_parameters(), original.parameters(), strict=False):
        assert torch.equal(ours, theirs), name
    for key, value in original.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key


def test_the_weight_quantizer_sees_the_folded_weight(zoo: SimpleNamespace) -> None:
    model = zoo.quantized(zoo.seeded(zoo.Residual).eval())
    factor = model.bn1.weight / torch.sqrt(model.bn1.running_var + model.bn1.eps)
    folded = model.conv1.weight * factor[:, None, None, None]
    scale = quantizers_of(model)["conv1:weight"].scale
    low, high = folded.flatten(1).amin(1), folded.flatten(1).amax(1)
    assert torch.allclose(scale, torch.maximum(high / 127, low / -128).detach())


def test_training_updates_statistics_as_the_float_model_does(zoo: SimpleNamespace) -> None:
    model = zoo.seeded(zoo.Residual)
    original = copy.deepcopy(model)
    weights_only(model, zoo)
    for training_model in (model, original):
        training_model.train()
    # when σ shrinks, w·γ/σ grows out of the calibrated range a little: later steps clip some weights
    for step, tolerance in ((1, 1e-4), (2, 5e-3), (3, 5e-3)):
        for training_model in (model, original):
            training_model(zoo.example(model, batch=16, seed=step))
        for norm, reference in ((model.bn1, original.bn1), (model.bn2, original.bn2)):
            assert norm.num_batches_tracked == reference.num_batches_tracked == step
            assert relative(norm.running_mean, reference.running_mean) < tolerance
            assert relative(norm.running_var, reference.running_var) < tolerance


def test_training_output_and_gradients_are_those_of_the_float_model(zoo: SimpleNamespace) -> None:
    model = zoo.seeded(zoo.Residual).train()
    original = copy.deepcopy(model)
    weights_only(model, zoo)
    x = zoo.example(model, batch=16)
    ours, theirs = model(x), original(x)
    assert relative(ours, theirs) < 2e-3
    ours.square().sum().backward()
    theirs.square().sum().backward()
    quantized = dict(model.named_parameters())
    for name, parameter in original.named_parameters():
        assert parameter.grad is not None
        grad = quantized[name].grad
        assert grad is not None, name
        assert relative(grad, parameter.grad) < 1e-2, name


def test_eval_mode_gradients_reach_weight_and_norm(zoo: SimpleNamespace) -> None:
    model = zoo.quantized(zoo.seeded(zoo.Residual).eval())
    model(zoo.example(model)).square().sum().backward()
    for name in (
        "conv1.weight",
        "bn1.weight",
        "bn1.bias",
        "conv2.weight",
        "bn2.weight",
        "bn2.bias",
        "head.bias",
    ):
        grad = model.get_parameter(name).grad
        assert grad is not None, name
        assert grad.abs().max() > 0, name


def test_a_dead_channel_stays_finite(zoo: SimpleNamespace) -> None:
    model = zoo.seeded(zoo.Residual)
    with torch.no_grad():
        model.bn1.weight[2] = 0.0
    zoo.quantized(model)
    model.train()
    out = model(zoo.example(model))
    out.sum().backward()
    assert torch.isfinite(out).all()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    assert torch.isfinite(model.eval()(zoo.example(model))).all()


OPERATORS: list[tuple[str, Any, Any, tuple[int, ...]]] = [
    ("conv1d", nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6), (5, 4, 9)),
    ("conv3d", nn.Conv3d(2, 6, 2), nn.BatchNorm3d(6), (3, 2, 4, 4, 4)),
    ("grouped", nn.Conv2d(4, 6, 3, groups=2), nn.BatchNorm2d(6), (3, 4, 6, 6)),
    ("depthwise", nn.Conv2d(6, 6, 3, groups=6), nn.BatchNorm2d(6), (3, 6, 6, 6)),
    ("transpose", nn.ConvTranspose2d(4, 6, 3), nn.BatchNorm2d(6), (3, 4, 5, 5)),
    ("grouped transpose", nn.ConvTranspose2d(4, 6, 3, groups=2), nn.BatchNorm2d(6), (3, 4, 5, 5)),
    ("linear", nn.Linear(4, 6), nn.BatchNorm1d(6), (9, 4)),
    ("no affine", nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, affine=False), (3, 4, 6, 6)),
]


@pytest.mark.parametrize(("name", "operator", "norm", "shape"), OPERATORS, ids=[o[0] for o in OPERATORS])
@pytest.mark.parametrize("training", [False, True])
def test_every_operator_that_can_be_folded(name: str, operator: Any, norm: Any, shape: Any, training: bool) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(copy.deepcopy(operator), copy.deepcopy(norm))
    model[1].running_mean.normal_()
    model[1].running_var.uniform_(0.5, 2.0)
    if norm.affine:
        nn.init.normal_(model[1].weight)
        nn.init.normal_(model[1].bias)
    original = copy.deepcopy(model)
    x = torch.randn(shape)
    site = SiteSpec(format=Format.parse("int16/channel/sym"))
    prepare(model, Plan(sites={"0:weight": site}, fold={"1": "0"}), inputs=x)
    calibrate(model, [x])
    model.train(training)
    original.train(training)
    assert relative(model(x), original(x)) < 1e-3
    if not training:  # the norm is really gone
        between = torch.randn(original[0](x).shape)
        assert torch.equal(model[1](between), between)


def test_a_folded_pair_that_is_called_twice() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.conv = nn.Conv2d(3, 3, 1)
            self.norm = nn.BatchNorm2d(3)
            self.norm.running_var.fill_(4.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.conv(self.norm(self.conv(x))))

    model = Pair().eval()
    original = copy.deepcopy(model)
    x = torch.randn(2, 3, 4, 4)
    fine = SiteSpec(format=Format.parse("int16/tensor/sym"))
    sites = {"conv:weight": fine, "conv:input": fine, "conv#1:input": fine, "norm#1:output": fine}
    prepare(model, Plan(sites=sites, fold={"norm": "conv"}))
    calibrate(model, [x])
    assert relative(model(x), original(x)) < 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_low_precision_model_folds_in_float32(dtype: torch.dtype, zoo: SimpleNamespace) -> None:
    model = zoo.seeded(zoo.Residual).eval().to(dtype)
    factor = model.bn1.weight.float() / torch.sqrt(model.bn1.running_var.float() + model.bn1.eps)
    folded = model.conv1.weight.float() * factor[:, None, None, None]
    x = zoo.example(model).to(dtype)
    prepare(model, place(capture(model, x), "onnxruntime"))
    calibrate(model, [x])
    scale = quantizers_of(model)["conv1:weight"].scale
    low, high = folded.flatten(1).amin(1), folded.flatten(1).amax(1)
    assert scale.dtype == torch.float32
    assert torch.allclose(scale, torch.maximum(high / 127, low / -128).detach(), rtol=1e-5)
    assert model(x).dtype == dtype
