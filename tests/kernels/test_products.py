"""Products where this machine has other hardware than the one they are for."""

from __future__ import annotations

import pytest
import torch

from bitwright.kernels import products
from bitwright.kernels.codes import FULL, encode, encode_rows
from bitwright.kernels.int8 import Int8


@pytest.mark.skipif(products.limit() < FULL, reason="a CPU whose products saturate is no model of CUDA")
@pytest.mark.parametrize("positive", [False, True])
def test_cudas_product_takes_unsigned_codes_too(positive: bool) -> None:
    """torch._int_mm runs on CPUs as well: shifted codes and their correction are the same there."""
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    x = x.relu() if positive else x
    codes, rows = encode(x), encode_rows(torch.randn(16, 64, generator=torch.Generator().manual_seed(1)), FULL)
    assert codes.zero == (0 if positive else 128)
    wanted = torch.nn.functional.linear(codes.float(), rows.float(), torch.ones(16))
    assert torch.allclose(products._int_mm(codes, rows, torch.ones(16)), wanted, atol=1e-4)


def test_what_really_runs_differs_by_kind_and_device() -> None:
    cuda = torch.device("cuda")
    assert Int8.missing_for("linear", cuda) is None
    assert "CPUs only" in str(Int8.missing_for("conv2d", cuda))
    assert "mps" in str(Int8.missing_for("linear", torch.device("mps")))
