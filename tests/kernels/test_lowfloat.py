from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

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
