from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bitwright import Plan
from bitwright.graph import capture
from bitwright.kernels.lowfloat import Fp8
from bitwright.plan import ComputeSpec

BACKWARD = [(), ("input",), ("weight",), ("input", "weight")]
CALLS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "linear": (F.linear, (4, 8, 32), (48, 32)),
    "other sizes": (F.linear, (5, 30), (11, 30)),
    "matmul": (torch.matmul, (2, 16, 32), (2, 32, 16)),
}


def run(name: str, kernel: Fp8 | None) -> tuple[Tensor, ...]:
    """Result and gradients."""
    func, left, right = CALLS[name]
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator).requires_grad_() for shape in (left, right))
    more = (torch.randn(right[0], generator=generator).requires_grad_(),) if func is F.linear else ()
    result = func(a, b, *more) if kernel is None else kernel(func, (a, b, *more), {})
    grad = torch.randn(result.shape, generator=generator)
    return result, *torch.autograd.grad(result, (a, b, *more), grad)


@pytest.fixture(params=["simulated", "scaled_mm"])
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """torch also multiplies 8-bit floats on CPUs, too slowly for training."""
    if request.param == "scaled_mm":
        monkeypatch.setattr(Fp8, "missing", classmethod(lambda cls, device: None))
    return str(request.param)


@pytest.mark.parametrize("backward", BACKWARD)
@pytest.mark.parametrize("name", CALLS)
def test_float_is_near(name: str, backward: tuple[str, ...], how: str) -> None:
    kernel = Fp8(ComputeSpec(format="fp8", backward=backward))
    for low, exact in zip(run(name, kernel), run(name, None), strict=True):
        assert low.shape == exact.shape
        assert torch.cosine_similarity(low.flatten(), exact.flatten(), dim=0) > 0.99


@pytest.mark.parametrize("name", CALLS)
def test_real_and_simulated_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fp8, "missing", classmethod(lambda cls, device: None))
    spec = ComputeSpec(format="fp8", backward=("input", "weight"))
    calls: list[Any] = []
    real = torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", lambda *args, **kwargs: calls.append(args) or real(*args, **kwargs))
    for one, other in zip(run(name, Fp8(spec)), run(name, Fp8(spec, simulate=True)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    formats = {(first.dtype, second.dtype) for first, second, *_ in calls}
    if name == "other sizes":  # neither 11 outputs nor 30 terms are multiples of 16
        assert not calls
    else:
        assert formats == {
            (torch.float8_e4m3fn, torch.float8_e4m3fn),
            (torch.float8_e5m2, torch.float8_e4m3fn),
        }


def test_values_are_those_of_e4m3() -> None:
    weight = torch.linspace(-448, 448, 4096).view(64, 64)
    found = Fp8.rounded(weight, "linear", ComputeSpec(format="fp8"))
    assert torch.equal(found, weight.to(torch.float8_e4m3fn).float())


def test_small_gradients_remain() -> None:
    """e5m2 has normal numbers down to 2⁻³⁰ of the largest one, e4m3 down to 2⁻¹⁴."""
    grad = torch.tensor([[1.0], [2.0**-28]]).expand(2, 16)
    x = torch.ones(2, 16, requires_grad=True)
    result = Fp8(ComputeSpec(format="fp8"))(F.linear, (x, torch.eye(16)), {})
    assert torch.autograd.grad(result, x, grad)[0][1].min() == pytest.approx(2.0**-28, rel=0.13)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_invalid_numbers_are_seen(value: float) -> None:
    x = torch.ones(2, 16)
    x[0, 0] = value
    assert Fp8(ComputeSpec(format="fp8"))(F.linear, (x, torch.ones(16, 16)), {}).isnan().any()


def test_zeros_pass_and_empty_batches_stay_float() -> None:
    kernel = Fp8(ComputeSpec(format="fp8"))
    assert torch.equal(kernel(F.linear, (torch.zeros(2, 16), torch.ones(16, 16)), {}), torch.zeros(2, 16))
    assert kernel(F.linear, (torch.zeros(0, 16), torch.ones(4, 16)), {}).shape == (0, 4)


def test_devices_without_8_bit_floats_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "not on cpu" in str(Fp8.missing(torch.device("cpu")))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = {}
    for capability in ((7, 5), (8, 0), (8, 9), (9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, value=capability: value)
        found[capability] = Fp8.missing(torch.device("cuda")) is None
    assert found == {(7, 5): False, (8, 0): False, (8, 9): True, (9, 0): True}


def test_plans_can_name_it() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    graph = capture(model, torch.randn(4, 16))
    assert sorted(Plan(compute={"*": ComputeSpec(format="fp8")}).resolve(graph).compute) == ["0", "2"]
