"""One quantizer at one site, calibrated with a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bitwright.core.formats import Format
from bitwright.core.registry import QUANTIZERS
from bitwright.plan import SiteSpec
from bitwright.quantizers import Layout, Quantizer

Build = Callable[..., Quantizer]


def build_quantizer(
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
    quantizer.update_grid()
    return quantizer
