"""int16-pairs: no pair of products of one sign may leave int16, and no scale is raised without need."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from bitwright.core.formats import Format
from bitwright.plan import Plan, SiteSpec
from bitwright.ptq import calibrate
from bitwright.quantizers import Quantizer, prepare, quantizers_of


class One(nn.Module):
    """One operator with one weight."""

    def __init__(self, kind: str, weight: Tensor, **options: Any) -> None:
        super().__init__()
        self.kind, self.options = kind, options
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "matmul":
            return x @ self.weight
        if self.kind == "matmul of a transposed parameter":
            return x @ self.weight.t()
        return getattr(F, self.kind)(x, self.weight, **self.options)


def guarded(kind: str, weight: Tensor, x: Tensor, format: str, guard: str | None) -> Quantizer:
    torch.set_num_threads(1)
    model = One(kind, weight.clone())
    site = "/matmul#0:input1" if kind.startswith("matmul") else f"/{kind}#0:weight"
    prepare(model, Plan(sites={site: SiteSpec(format=Format.parse(format), guard=guard)}))
    calibrate(model, [x])
    return quantizers_of(model)[site]


def worst_pair(rows: Tensor) -> int:
    """The largest sum of two neighbours' codes of one sign, pairs 0-1, 2-3, … of each row; a plain loop."""
    worst = 0
    for row in rows.tolist():
        for i in range(0, len(row), 2):
            a, b = row[i], row[i + 1] if i + 1 < len(row) else 0
            worst = max(worst, abs(a + b) if a * b > 0 else max(abs(a), abs(b)))
    return worst


def summed_rows(kind: str, codes: Tensor) -> list[Tensor]:
    """The codes in the orders in which runtimes add them: over the whole row and per kernel position."""
    if kind == "conv_transpose2d":
        codes = codes.transpose(0, 1)
    if kind.startswith("conv"):
        positions_last = codes.permute(0, 2, 3, 1)
        return [positions_last.flatten(1), positions_last.flatten(0, 2)]
    return [codes.t() if kind.startswith("matmul") else codes]


SHAPES = [
    ("conv2d", (4, 6, 3, 3), (1, 6, 4, 4)),
    ("conv2d", (4, 3, 3, 3), (1, 3, 4, 4)),
    ("conv2d", (5, 1, 3, 3), (1, 1, 4, 4)),
    ("conv_transpose2d", (5, 4, 3, 3), (1, 5, 4, 4)),
    ("linear", (4, 8), (1, 8)),
    ("linear", (4, 7), (1, 7)),
    ("matmul", (8, 4), (1, 8)),
    ("matmul", (7, 4), (1, 7)),
    ("matmul of a transposed parameter", (4, 7), (1, 7)),
]


@pytest.mark.parametrize("case", SHAPES, ids=lambda case: f"{case[0]}-{case[1]}")
@pytest.mark.parametrize("format", ["int8/channel/sym", "int8/tensor/sym"])
@settings(max_examples=12)
@given(seed=st.integers(0, 10_000), tail=st.sampled_from([1.0, 3.0]))
def test_guarded_pair_sums_fit_into_int16(case: Any, format: str, seed: int, tail: float) -> None:
    kind, shape, x_shape = case
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator)
    weight = weight.sign() * weight.abs() ** tail
    x = torch.ones(x_shape)
    safe = guarded(kind, weight, x, format, "int16-pairs")
    plain = guarded(kind, weight, x, format, None)
    used = weight.t() if "transposed" in kind else weight
    codes = safe.integers(used)
    assert all(worst_pair(rows) <= 128 for rows in summed_rows(kind, codes))
    assert (safe.scale >= plain.scale).all()
    assert (safe.scale <= plain.scale * 2.02).all()  # never worse than giving up a bit
    again = guarded(kind, weight, x, format, "int16-pairs")
    assert torch.equal(again.scale, safe.scale)


def test_unguarded_codes_exceed_the_range() -> None:
    weight = torch.ones(2, 4)
    plain = guarded("linear", weight, torch.ones(1, 4), "int8/channel/sym", None)
    assert worst_pair(plain.integers(weight)) == 254
    safe = guarded("linear", weight, torch.ones(1, 4), "int8/channel/sym", "int16-pairs")
    assert 126 <= worst_pair(safe.integers(weight)) <= 128


def test_guards_change_only_channels_that_exceed_the_range() -> None:
    weight = torch.tensor([[1.0, 1.0, 0.1, 0.1], [1.0, -1.0, 0.2, -0.1]])
    safe = guarded("linear", weight, torch.ones(1, 4), "int8/channel/sym", "int16-pairs")
    plain = guarded("linear", weight, torch.ones(1, 4), "int8/channel/sym", None)
    assert safe.scale[0] > 1.9 * plain.scale[0]
    assert safe.scale[1] == plain.scale[1]
