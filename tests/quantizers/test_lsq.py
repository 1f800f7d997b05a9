"""LSQ against the formula, in float64."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from bitwright.backends import place
from bitwright.core.formats import Format
from bitwright.graph import capture
from bitwright.plan import Plan, SiteSpec
from bitwright.ptq import calibrate, settle_weights
from bitwright.quantizers import Grid, Quantizer, prepare, quantizers_of


def lsq(format: str, weight: torch.Tensor) -> Quantizer:
    torch.set_num_threads(1)
    model = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    model.weight.data.copy_(weight)
    root = nn.Sequential(model)
    prepare(root, Plan(sites={"0:weight": SiteSpec(format=Format.parse(format), quantizer="lsq")}))
    calibrate(root, [torch.ones(1, weight.shape[1])])
    return quantizers_of(root)["0:weight"]


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    format=st.sampled_from(
        ["int2/tensor/sym", "int4/tensor/sym", "uint4/tensor/asym", "int8/channel/sym", "int4/channel/asym"]
    ),
    shrink=st.floats(0.2, 1.5),
)
def test_forward_and_gradients_follow_the_formula(seed: int, format: str, shrink: float) -> None:
    generator = np.random.default_rng(seed)
    w = generator.normal(size=(3, 8)).astype(np.float32)
    upstream = generator.normal(size=(3, 8)).astype(np.float32)
    quantizer = lsq(format, torch.from_numpy(w))
    with torch.no_grad():
        quantizer.scale.mul_(shrink)  # as training might: some values are clipped now
    x = torch.from_numpy(w).requires_grad_()
    out = quantizer(x)
    out.backward(torch.from_numpy(upstream))

    s = quantizer.scale.detach().double().numpy().reshape(-1, 1)
    z = quantizer.zero_point.double().numpy().reshape(-1, 1)
    n, p = quantizer.qmin, quantizer.qmax
    steps = w / s + z
    near_edge = (np.abs(steps - n) < 1e-4) | (np.abs(steps - p) < 1e-4)
    near_half = np.abs(w / s - np.floor(w / s) - 0.5) < 1e-4  # float32 may round the other way
    assume(not near_edge.any() and not near_half.any())
    x_hat = (np.clip(np.rint(w / s) + z, n, p) - z) * s
    below, above = steps < n, steps > p
    g = 1.0 / np.sqrt(w.size / s.size * p)
    ds = np.where(below, n - z, np.where(above, p - z, (x_hat - w) / s))
    ds = g * (ds * upstream).reshape(s.size, -1).sum(axis=1)
    assert np.allclose(out.detach().numpy(), x_hat, atol=1e-6, rtol=1e-6)
    assert x.grad is not None
    assert np.allclose(x.grad.numpy(), np.where(below | above, 0, upstream), atol=1e-6, rtol=1e-6)
    assert quantizer.scale.grad is not None
    assert np.allclose(quantizer.scale.grad.numpy().ravel(), ds, atol=2e-6 * max(1.0, np.abs(ds).max()), rtol=1e-5)


def test_values_lie_exactly_on_the_grid_that_is_exported() -> None:
    torch.manual_seed(0)
    w = torch.randn(16, 64)
    quantizer = lsq("int8/channel/sym", w)
    grid: Grid = quantizer.grid()
    assert torch.equal(quantizer(w), quantizer.integers(w) * grid.scale[:, None])


def test_the_scale_is_a_parameter_that_learns() -> None:
    torch.manual_seed(0)
    w = torch.randn(4, 32)
    quantizer = lsq("int3/tensor/sym", w)
    assert isinstance(quantizer.scale, nn.Parameter)
    optimizer = torch.optim.Adam(quantizer.parameters(), lr=0.01)
    errors = []
    for _ in range(60):
        optimizer.zero_grad()
        error = (quantizer(w) - w).square().mean()
        error.backward()
        optimizer.step()
        errors.append(error.item())
    assert errors[-1] < 0.8 * errors[0]


def test_calibrating_again_keeps_the_parameter_that_the_optimizer_holds() -> None:
    root = nn.Sequential(nn.Linear(4, 3))
    prepare(root, Plan(sites={"0:weight": SiteSpec(format=Format.parse("int8/channel/sym"), quantizer="lsq")}))
    calibrate(root, [torch.ones(1, 4)])
    scale = quantizers_of(root)["0:weight"].scale
    with torch.no_grad():
        root[0].weight.mul_(2)
    before = scale.detach().clone()
    calibrate(root, [torch.ones(1, 4)])
    assert quantizers_of(root)["0:weight"].scale is scale
    assert torch.equal(scale.detach(), before * 2)


def test_power_of_two_survives_training() -> None:
    torch.manual_seed(0)
    w = torch.randn(4, 32)
    quantizer = lsq("int4/channel/sym/pot", w)
    with torch.no_grad():
        quantizer.scale.mul_(torch.tensor([1.0, 1.1, 1.3, 1.9]))
    scale = quantizer.grid().scale
    assert (np.frexp(scale.numpy())[0] == 0.5).all()
    assert torch.equal(quantizer(w), quantizer.integers(w) * scale[:, None])
    quantizer(w).sum().backward()
    assert quantizer.scale.grad is not None
    assert quantizer.scale.grad.abs().min() > 0


@pytest.mark.parametrize("scale", [-0.05, 0.0, 1e-12])
def test_nonpositive_learned_scales_stay_usable(scale: float) -> None:
    w = torch.randn(2, 8)
    quantizer = lsq("int4/tensor/sym", w)
    with torch.no_grad():
        quantizer.scale.fill_(scale)
    out = quantizer(w)
    out.sum().backward()
    assert torch.isfinite(out).all()
    assert torch.isfinite(quantizer.scale.grad).all()
    assert (quantizer.grid().scale > 0).all()


def _folded(gamma: float) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d(6))
    nn.init.constant_(model[1].weight, gamma)
    x = torch.randn(8, 4, 8, 8)
    plan = place(capture(model, x), "onnxruntime", quantizer="lsq", saturating=False)
    prepare(model, plan)
    calibrate(model, [x])
    with torch.no_grad():
        quantizers_of(model)["0:weight"].scale.mul_(1.05)  # nothing lies on the end of the range, where ∂s leaps
    return model, x


def test_gradients_of_folded_scales_do_not_depend_on_the_norm() -> None:
    """γ scales the folded weight and with it the scale: its relative step must not depend on γ."""
    steps = []
    for gamma in (0.02, 1.0, 5.0):
        model, x = _folded(gamma)
        scale = quantizers_of(model)["0:weight"].scale
        model.train()
        # the norm's output has the size of γ: so has this loss's gradient, divided out again
        (model(x) / gamma).square().sum(dim=(0, 2, 3)).mul(torch.arange(1.0, 7.0)).sum().backward()
        steps.append(scale.grad / scale.detach())
    torch.testing.assert_close(steps[0], steps[1], rtol=0.05, atol=0.02 * float(steps[1].abs().max()))
    torch.testing.assert_close(steps[2], steps[1], rtol=0.05, atol=0.02 * float(steps[1].abs().max()))


def test_copies_keep_the_units_of_their_gradients() -> None:
    model, x = _folded(0.02)
    twin = copy.deepcopy(model)
    grads = []
    for each in (model, twin):
        each.train()
        each(x).square().sum().backward()
        grads.append(quantizers_of(each)["0:weight"].scale.grad)
    assert torch.equal(grads[0], grads[1])


def test_a_learned_scale_below_its_guard_is_raised_to_the_guard() -> None:
    """What is trained is what is deployed: else norms learn the statistics of a weight that is clipped away later."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 6, 3, bias=False))
    x = torch.randn(2, 4, 8, 8)
    prepare(model, place(capture(model, x), "onnxruntime", quantizer="lsq", saturating=True))
    calibrate(model, [x])
    quantizer = quantizers_of(model)["0:weight"]
    guarded = quantizer.scale.detach().clone()
    with torch.no_grad():
        quantizer.scale.mul_(0.25)  # as training may
    model.train()
    before = model(x)
    settle_weights(model, x)
    torch.testing.assert_close(quantizer.scale.detach(), guarded)
    torch.testing.assert_close(model(x), before)
