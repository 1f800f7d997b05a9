"""Ranges that follow the data while a model trains."""

from __future__ import annotations

from typing import Any

import torch

from bitwright.attach import Quantizer
from bitwright.ptq.ranks import merge_ranges, several


@torch.no_grad()
def settle_ranges(quantizers: list[Quantizer], group: Any = None) -> None:
    """Let each quantizer take the range that its observer has now; sites that no tensor reached keep theirs.

    Where `torch.distributed` is initialised, all processes must call this: ranges are merged in one collective, and
    all have bit-equal grids.
    """
    seen = [q for q in quantizers if q.saw and q.observer is not None]
    ranges = {q.site: q.observer.range() for q in seen if q.observer is not None}
    if several(group):
        ranges = merge_ranges(quantizers, [q.scale.numel() for q in quantizers], ranges, group)
    for quantizer in quantizers:
        if quantizer.site in ranges:
            quantizer.settle_to(*ranges[quantizer.site], quantizer.observed_shape)
