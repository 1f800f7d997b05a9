"""How a quantizer at one site comes to be in these tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bitwright.attach import Layout, Quantizer
from bitwright.formats import Format
from bitwright.plan import SiteSpec
from bitwright.registry import QUANTIZERS

Build = Callable[..., Quantizer]


def _build(
    name: str, format: str, seen: Tensor, *, weight: bool = False, observer: str = "minmax", **options: Any
) -> Any:
    torch.set_num_threads(1)
    parsed = Format.parse(format)
    port = "weight" if weight else "input"
    quantizer = QUANTIZERS.get(name)(
        SiteSpec(format=parsed, quantizer=name, observer=observer),
        site=f"test:{port}",
        kind="linear",
        port=port,
        layout=Layout(parsed.granularity, 0 if parsed.granularity == "channel" else 1, parsed.group),
        weight=weight,
        **options,
    )
    quantizer.observe(seen)
    quantizer.settle()
    return quantizer


@pytest.fixture
def build() -> Build:
    """A quantizer of that name and format, calibrated with the tensor."""
    return _build
