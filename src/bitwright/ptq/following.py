"""Ranges that follow the data while a model trains."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bitwright.attach import Quantizer


@torch.no_grad()
def settle_ranges(quantizers: Sequence[Quantizer]) -> None:
    """Let each quantizer take the range that its observer has now; sites that no tensor reached keep theirs."""
    for quantizer in quantizers:
        if quantizer.saw:
            quantizer.settle()
