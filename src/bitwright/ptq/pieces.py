"""Calibration batches cut into pieces, where that changes no range.

The activations of a large batch are blocks that come fresh from the system at each operator, whose pages it has to
clear: that may take twice as long as computing. Small ones are used again and again. Pieces also bound memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.attach import Quantizer
from bitwright.graph.capture import untouched
from bitwright.graph.tree import batch_size, part, tensors_in
from bitwright.registry import OBSERVERS

LARGEST = 12 * 2**20
"""Bytes of an activation up to which a C library's allocator keeps its memory (measured with glibc)."""

_KEPT = 31 * 2**20
"""glibc keeps freed blocks up to the size of the largest one that it has ever given back, of at most 32 MiB."""

_NEAR = 1e-4  # of a range: how much kernels for other sizes may differ, and a model whose samples are independent can't


def piece_size(model: nn.Module, quantizers: Sequence[Quantizer], batch: Any, run: Callable[[Any], None]) -> int | None:
    """How many samples at a time to calibrate with; None: whole batches.

    Two samples go through the model, one by one and together: if any site's range differs, batches stay whole, as they
    do where an observer counts batches. Nothing of it is left in the model.
    """
    whole = batch_size(batch)
    watched = {q for q in quantizers if not q.weight and not q.of}
    if whole < 3 or not all(tensor.device.type == "cpu" for _, tensor in tensors_in(batch)):
        return None
    if any(OBSERVERS.get(q.spec.observer).by_batch for q in watched):
        return None
    with untouched(model, train=False):
        try:
            for quantizer in quantizers:
                quantizer.observing = quantizer in watched  # weights don't depend on batches
            run(part(batch, 0, 1))
            size = LARGEST // max((4 * q.observed_shape.numel() for q in watched if q.observer is not None), default=1)
            if size >= whole:
                return None
            run(part(batch, 1, 2))
            apart = _ranges(watched)
            for quantizer in watched:
                quantizer.observer = None
            run(part(batch, 0, 2))
            together = _ranges(watched)
        except Exception:  # only whole batches will do; if they won't either, they say what is wrong
            return None
    torch.empty(_KEPT, dtype=torch.uint8)  # and freed again
    same = apart.keys() == together.keys() and all(_near(apart[site], together[site]) for site in apart)
    return max(1, size) if same else None


def _ranges(watched: Iterable[Quantizer]) -> dict[str, Tensor]:
    return {q.site: torch.stack(q.observer.range()) for q in watched if q.observer is not None}


def _near(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a - b).abs() <= _NEAR * (b[1] - b[0])).all())
