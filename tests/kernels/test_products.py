"""Products where this machine has other hardware than the one they are for."""

from __future__ import annotations

import pytest
import torch

from bitwright.kernels import products
from bitwright.kernels.codes import EXACT, encode, encode_rows
from bitwright.kernels.int8 import Int8

LIMIT = products.limit()


def _rows(count: int, depth: int, seed: int) -> torch.Tensor:
    return torch.randn(count, depth, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("rows", [32, 1500])  # uncompiled; compiled, in two parts
def test_integers_give_what_floats_of_their_values_give(
    rows: int, positive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_AT_ONCE", 1)
    x = _rows(rows, 64, 0)
    codes, weight = encode(x.relu() if positive else x), encode_rows(_rows(16 if rows < 100 else 80, 64, 1), LIMIT)
    assert codes.zero == (0 if positive else 128)
    bias = torch.linspace(-1, 1, len(weight.values))
    wanted = torch.nn.functional.linear(codes.float(), weight.float(), bias)
    found = products.linear(codes, weight, bias, simulate=False)
    assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("largest", [EXACT, LIMIT])
@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("rows", [40, 3000])
def test_sums_over_rows_are_as_exact_on_every_cpu(
    rows: int, positive: bool, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU whose products saturate has the small codes, those of the gradient, as second operand."""
    monkeypatch.setattr(products, "limit", lambda: largest)
    x = _rows(rows, 24, 0)
    codes = encode(x.relu() if positive else x)
    grad = encode(_rows(rows, 40, 1), signed=True, limit=largest, whole=True)
    wanted = (grad.values.double() - 128).t() @ (codes.values.double() - codes.zero) * float(grad.scales)
    found = products.transposed(grad, codes, simulate=False)
    assert torch.allclose(found.double(), wanted, rtol=1e-5, atol=1e-6 * float(wanted.abs().max()))


def test_only_cpus_take_a_few_rows_at_a_time() -> None:
    """CUDA's products refuse 16 rows and fewer, which a rest may have."""
    assert len(products._parts(torch.empty(1030, 8), 2048)) == 2
    assert products._parts(torch.empty(1030, 8, device="meta"), 2048) == [slice(None)]


def test_what_really_runs_differs_by_kind_and_device() -> None:
    cuda = torch.device("cuda")
    assert Int8.missing_for("linear", cuda) is None
    assert "need Triton" in str(Int8.missing_for("conv2d", cuda))
    assert "mps" in str(Int8.missing_for("linear", torch.device("mps")))
