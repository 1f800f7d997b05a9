from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bitwright import Plan
from bitwright.graph import capture
from bitwright.kernels import lowfloat
from bitwright.kernels.lowfloat import Bf16, Fp8, Fp16
from bitwright.plan import ComputeSpec

BACKWARD = [(), ("input",), ("weight",), ("input", "weight")]
CALLS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "linear": (F.linear, (4, 8, 32), (48, 32)),
    "other sizes": (F.linear, (5, 30), (11, 30)),
    "matmul": (torch.matmul, (2, 16, 32), (2, 32, 16)),
}


@pytest.mark.parametrize("kind", [Bf16, Fp16])
def test_an_embedding_sums_gradients_in_float32(kind: type[Bf16] | type[Fp16]) -> None:
    generator = torch.Generator().manual_seed(0)
    index, table = torch.randint(0, 2, (64, 128), generator=generator), torch.randn(2, 8, generator=generator)
    table.requires_grad_()
    grad = torch.rand(64, 128, 8, generator=generator)
    found = []
    for simulate in (False, True):
        rows = kind(ComputeSpec(format=kind.name), simulate=simulate)(F.embedding, (index, table), {})
        assert torch.equal(rows, F.embedding(index, table.to(kind.dtype)).float())
        found.append(torch.autograd.grad(rows, table, grad)[0])
    wanted = torch.autograd.grad(F.embedding(index, table), table, grad)[0]
    assert torch.equal(*found)
    assert torch.allclose(found[0], wanted, rtol=1e-3)


@pytest.mark.parametrize("native", [True, False])
def test_products_without_instructions_are_simulated(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways round operands, results and gradients to float16, and add in float32."""
    monkeypatch.setattr(lowfloat, "_has_float16_products", lambda: native)
    kernel = Fp16(ComputeSpec(format="fp16"))
    assert (Fp16.missing_for("linear", torch.device("cpu")) is None) == native
    assert Fp16.missing_for("relu", torch.device("cpu")) is None
    assert Bf16.missing_for("linear", torch.device("cpu")) is None
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(8, 64, generator=generator).requires_grad_() for _ in range(2))
    y = kernel(F.linear, (x, weight), {})
    y.sum().backward()
    low = x.detach().half().float(), weight.detach().half().float()
    assert torch.equal(y, y.half().float())
    assert torch.allclose(y, low[0] @ low[1].T, rtol=1e-3, atol=1e-2)
    assert x.grad is not None
    assert torch.equal(x.grad, x.grad.half().float())
    assert torch.allclose(x.grad, low[1].sum(0).expand(8, 64), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kind", [Bf16, Fp16])
def test_an_operator_in_place_changes_its_input(kind: type[Bf16] | type[Fp16]) -> None:
    x = torch.tensor([-1.0, 0.1], requires_grad=True)
    y = x * 3
    result = kind(ComputeSpec(format=kind.name))(F.relu_, (y,), {})
    assert result is y
    assert torch.equal(y, torch.tensor([0.0, 0.3]).to(kind.dtype).float())
    y.sum().backward()
    assert torch.equal(x.grad, torch.tensor([0.0, 3.0]))


def test_a_batch_norm_updates_its_statistics_in_float32() -> None:
    x, mean, var = torch.randn(16, 3, 4, 4) + 5, torch.zeros(3), torch.ones(3)
    result = Fp16(ComputeSpec(format="fp16"))(F.batch_norm, (x, mean, var), {"training": True})
    assert mean.dtype is torch.float32
    assert torch.allclose(mean, 0.1 * x.mean((0, 2, 3)), atol=1e-2)
    assert torch.allclose(result, F.batch_norm(x, None, None, training=True), atol=1e-2)


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
