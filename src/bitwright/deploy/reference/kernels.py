"""Sums of integer products in NumPy: convolutions of any kind, and windows of pooling. Exact, not fast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bitwright.deploy.reference.integers import Codes


def padded(x: Codes, pads: Sequence[int], fill: int) -> Codes:
    """`x` with ONNX's pads (all begins, all ends) around its last axes; negative ones crop."""
    rank = len(pads) // 2
    begins, ends = list(pads[:rank]), list(pads[rank:])
    crop: list[Any] = [
        slice(max(-b, 0), size - max(-e, 0)) for b, e, size in zip(begins, ends, x.shape[-rank:], strict=True)
    ]
    x = x[..., *crop]
    width = [(0, 0)] * (x.ndim - rank) + [(max(b, 0), max(e, 0)) for b, e in zip(begins, ends, strict=True)]
    return np.pad(x, width, constant_values=fill)


def windows(x: Codes, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]) -> Codes:
    """(N, C, *out, *kernel): what each position of the kernel sees."""
    rank = len(kernel)
    span = [d * (k - 1) + 1 for k, d in zip(kernel, dilations, strict=True)]
    view = np.lib.stride_tricks.sliding_window_view(x, span, axis=tuple(range(-rank, 0)))
    steps: list[Any] = [slice(None, None, step) for step in (*strides, *dilations)]
    found: Codes = view[..., *steps]
    return found


def conv(x: Codes, weight: Codes, *, strides: Sequence[int], dilations: Sequence[int], group: int) -> Codes:
    """A convolution over `x` (N, C, *space), padded already, with `weight` (O, C/group, *kernel)."""
    rank = weight.ndim - 2
    seen = windows(x, weight.shape[2:], strides, dilations)
    batch, channels, out = seen.shape[0], seen.shape[1], seen.shape[2 : 2 + rank]
    # (N, group, positions, C/group · kernel) × (group, C/group · kernel, O/group)
    seen = seen.reshape(batch, group, channels // group, *seen.shape[2:])
    seen = np.moveaxis(seen, 2, 2 + rank).reshape(batch, group, int(np.prod(out)), -1)
    matrix = weight.reshape(group, weight.shape[0] // group, -1).transpose(0, 2, 1)
    sums: Codes = (seen @ matrix).transpose(0, 1, 3, 2)
    return sums.reshape(batch, weight.shape[0], *out)


def conv_transpose(
    x: Codes,
    weight: Codes,
    *,
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int],
    group: int,
    output_padding: Sequence[int],
) -> Codes:
    """A deconvolution: zeros between the inputs, then a convolution with the kernel turned round."""
    rank = weight.ndim - 2
    spread = np.zeros(
        (*x.shape[:2], *(s * (n - 1) + 1 for n, s in zip(x.shape[2:], strides, strict=True))), dtype=np.int64
    )
    steps: list[Any] = [slice(None, None, step) for step in strides]
    spread[..., *steps] = x
    reach = [d * (k - 1) for k, d in zip(weight.shape[2:], dilations, strict=True)]
    begins = [r - p for r, p in zip(reach, pads[:rank], strict=True)]
    ends = [r - p + o for r, p, o in zip(reach, pads[rank:], output_padding, strict=True)]
    # (C, O/group, *kernel) → (O, C/group, *kernel)
    turned = weight.reshape(group, weight.shape[0] // group, *weight.shape[1:]).swapaxes(1, 2)
    turned = np.flip(turned.reshape(-1, *turned.shape[2:]), tuple(range(-rank, 0)))
    return conv(padded(spread, [*begins, *ends], 0), turned, strides=[1] * rank, dilations=dilations, group=group)
