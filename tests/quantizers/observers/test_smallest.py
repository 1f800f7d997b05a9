"""Numbers whose scale float32 doesn't have are an error at their site, for every observer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bitwright as bw
from bitwright.core.registry import OBSERVERS


@pytest.mark.parametrize("observer", OBSERVERS.names())
def test_too_small_values_are_rejected(observer: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8, bias=False), nn.ReLU(), nn.Linear(8, 4, bias=False)).eval()
    with pytest.raises(bw.BitwrightError) as caught:
        bw.quantize(model, [torch.randn(32, 16) * 1e-38], observer=observer)
    assert ("scale-underflow", "0:input") in [(p.code, p.where) for p in caught.value.problems]
