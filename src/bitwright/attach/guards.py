"""Guards: limits on a weight's codes that keep a target's accumulators exact.

`int16-pairs`: x86 without VNNI multiplies 8-bit numbers with an instruction that adds two adjacent
products into one int16 and saturates. 255·(|a| + |b|) ≤ 32767 holds when two paired codes of one sign
add up to at most 128. Halving the range (7 bits) would guarantee it everywhere; raising a channel's
scale only as far as its own worst pair needs costs much less precision.

Which codes are paired was measured: the summed elements in the order kernel position, input channel
(fastest), two by two; ONNX Runtime pairs over the whole row, OpenVINO within each kernel position. Both
are kept in range.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitwright.attach.grid import Layout

_PAIR_LIMIT = 128  # 255 · 128 = 32640 ≤ 32767
# Rounding may add half a code to each of the two.
_SAFE_SUM = _PAIR_LIMIT - 1


def _summed_last(weight: Tensor, kind: str) -> Tensor:
    """The weight as (output channel, kernel position, input channel)."""
    if kind.startswith("conv_transpose"):  # it has its input channels first
        weight = weight.transpose(0, 1)
    if kind.startswith("conv"):
        return weight.movedim(1, -1).reshape(weight.shape[0], -1, weight.shape[1])
    if kind in ("matmul", "addmm"):
        return weight.reshape(-1, *weight.shape[-2:]).transpose(-1, -2).reshape(-1, 1, weight.shape[-2])
    return weight.reshape(weight.shape[0], 1, -1)


def _worst_pair(rows: Tensor) -> Tensor:
    """The largest |a + b| of one sign over pairs (0, 1), (2, 3), … of the last axis, per first axis.

    Of pairs with two signs, the larger number counts: |a + b| is less than that, as it is more where signs are equal.
    """
    if rows.shape[-1] % 2:
        rows = torch.nn.functional.pad(rows, (0, 1))
    return torch.maximum(_largest(rows[..., 0::2] + rows[..., 1::2]), _largest(rows))


def _largest(rows: Tensor) -> Tensor:
    """max |x| per first axis; two reductions make no copy of a large weight, as |x| would."""
    rest = tuple(range(1, rows.dim()))
    return torch.maximum(rows.amax(dim=rest), -rows.amin(dim=rest))


def _worst(rows: Tensor) -> Tensor:
    """Over both ways to pair, of which an even number of channels makes one."""
    within = _worst_pair(rows)
    return within if rows.shape[-1] % 2 == 0 else torch.maximum(within, _worst_pair(rows.flatten(1)))


def needed_scale(guard: str, rows: Tensor) -> Tensor:
    """The smallest scale per output channel that keeps the guard; the weight as (output, position, input channel)."""
    assert guard == "int16-pairs"  # the plan's validation knows the guards
    return _worst(rows) / _SAFE_SUM


def guarded_scale(guard: str, scale: Tensor, weight: Tensor, *, kind: str, layout: Layout) -> Tensor:
    """The scale, raised where the guard needs it."""
    needed = needed_scale(guard, _summed_last(weight, kind))
    if layout.granularity == "channel" and needed.shape == scale.shape:
        return torch.maximum(scale, needed)
    return torch.maximum(scale, needed.amax())


def holds(guard: str, codes: Tensor, *, kind: str) -> bool:
    """Whether a weight's codes keep to the guard: training may have moved them since calibration."""
    assert guard == "int16-pairs"
    rows = _summed_last(codes.double(), kind)
    return bool((_worst(rows) <= _PAIR_LIMIT).all())
