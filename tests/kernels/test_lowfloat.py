from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from bitwright.kernels import lowfloat
from bitwright.kernels.lowfloat import Bf16, Fp16
from bitwright.plan import ComputeSpec


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
