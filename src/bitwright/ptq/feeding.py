"""How calibration batches are fed to the model: in pieces and channels-last, where that changes no range.

The activations of a large batch are blocks that come fresh from the system at each operator, whose pages it has to
clear: that may take twice as long as computing. Those of pieces are used again and again. Pieces also bound memory.
Convolutions of channels-last images leave out the reordering before and after each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.allocator import keep_memory
from bitwright.attach import Quantizer
from bitwright.batching import split
from bitwright.graph.capture import untouched
from bitwright.graph.tree import batch_size, channels_last, part, tensors_in
from bitwright.registry import OBSERVERS

LARGEST = 12 * 2**20
"""Bytes of an activation up to which a C library's allocator keeps its memory (measured with glibc)."""

_NEAR = 1e-4  # of a range: how much kernels for other sizes may differ, and a model whose samples are independent can't


@dataclass(frozen=True)
class Feed:
    """How many samples at a time (None: whole batches), and how their images lie in memory."""

    size: int | None = None
    channels_last: bool = False

    def pieces(self, batch: Any) -> Iterator[Any]:
        """The batch as the model gets it."""
        for piece in [batch] if self.size is None else split([batch], self.size):
            yield channels_last(piece) if self.channels_last else piece


def how_to_feed(model: nn.Module, quantizers: Sequence[Quantizer], batch: Any, run: Callable[[Any], None]) -> Feed:
    """Try it with two samples, one by one, together, and channels-last: what changes any site's range isn't done.

    Where an observer counts batches they stay as they are. Nothing of the trial is left in the model.
    """
    whole = batch_size(batch)
    watched = {q for q in quantizers if not q.weight and not q.of}
    tensors = [tensor for _, tensor in tensors_in(batch)]
    if whole < 3 or not all(tensor.device.type == "cpu" for tensor in tensors):
        return Feed()
    if any(OBSERVERS.get(q.spec.observer).by_batch for q in watched):
        return Feed()

    def ranges(samples: Any) -> dict[str, Tensor]:
        run(samples)
        return {q.site: torch.stack(q.observer.range()) for q in watched if q.observer is not None}

    def forget() -> None:
        for quantizer in watched:
            quantizer.observer = None

    first, second = part(batch, 0, 1), part(batch, 1, 2)
    with untouched(model, train=False):
        for quantizer in quantizers:
            quantizer.observing = quantizer in watched  # weights don't depend on batches
        try:
            alone = ranges(first)
            size = LARGEST // max((4 * q.observed_shape.numel() for q in watched if q.observer is not None), default=1)
            cut = size < whole
            if cut:
                apart = ranges(second)
                forget()
                cut = _alike(apart, ranges(part(batch, 0, 2)))
        except Exception:  # only whole batches will do; if they won't either, they say what is wrong
            return Feed()
        images = any(tensor.dim() == 4 and tensor.is_floating_point() for tensor in tensors)
        forget()
        try:
            images = images and _alike(alone, ranges(channels_last(first)))
        except Exception:  # such as of a view that wants another order
            images = False
    keep_memory()
    return Feed(max(1, size) if cut else None, images)


def _alike(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(_near(a[site], b[site]) for site in a)


def _near(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a - b).abs() <= _NEAR * (b[1] - b[0])).all())
