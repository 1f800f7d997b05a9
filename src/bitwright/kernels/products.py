"""Products of codes: in integers by what this machine is fast at, or the same numbers in float."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from bitwright.attach.compiled import Kernel as Compiled
from bitwright.attach.compiled import worthwhile
from bitwright.kernels.codes import EXACT, FULL, Codes, Signed, signed_bytes

Ints = Sequence[int]
DEEP = 1 << 16
"""Longer sums of products might not fit into int32: 255·127·66,312 doesn't."""


@cache
def missing() -> str | None:
    """Why integer products can't be run on this CPU; None if they can."""
    if not torch.backends.mkldnn.is_available():
        return "torch was built without oneDNN"
    if not hasattr(torch.ops.onednn, "qconv2d_pointwise"):
        return "this torch has no onednn::qconv2d_pointwise"
    return None


@cache
def limit() -> int:
    """The largest code of the second operand with which this CPU's products are exact: found by a product."""
    ones = torch.full((16, 64), FULL, dtype=torch.int8)
    return FULL if bool((torch._int_mm(ones, ones.t()) == FULL * FULL * 64).all()) else EXACT


def linear(x: Codes, weight: Signed, bias: Tensor | None, *, simulate: bool) -> Tensor:
    """x · weightᵀ + bias, by integers where they run, else by floats of the same values."""
    depth = x.values.shape[-1]
    if simulate or not _runs(x.values.numel() // depth, depth, weight.values):
        return F.linear(x.float(), weight.float(), bias)
    if depth > DEEP:
        parts = zip(x.values.split(DEEP, -1), weight.values.split(DEEP, -1), strict=True)
        sums = [
            linear(Codes(one, x.scales, x.zero), Signed(other, weight.scales), None, simulate=False)
            for one, other in parts
        ]
        return _together(sums, bias)
    rows = signed_bytes(x.values.reshape(-1, depth))
    offset = _shifted(weight.values, 128 - x.zero)[None]
    steps = x.scales.expand(len(rows)).contiguous()
    shift = torch.zeros_like(weight.scales) if bias is None else bias
    found = _numbers(rows, weight.values, offset, steps, weight.scales, shift)
    return found.view(*x.values.shape[:-1], len(weight.values))


def transposed(grad: Signed, x: Tensor, shift: int, *, simulate: bool) -> Tensor:
    """gradᵀ · (x + shift), summed over rows: signed codes both; `grad` has one scale, with the steps of `x` in it."""
    count, outputs = grad.values.shape
    columns = x.shape[1]
    if simulate or not _runs(outputs, count, x.t()):
        return (grad.values.to(torch.float32) * grad.scales).t() @ (x.to(torch.float32) + shift)
    if count > DEEP:
        parts = zip(grad.values.split(DEEP), x.split(DEEP), strict=True)
        return _together([transposed(Signed(g, grad.scales), c, shift, simulate=False) for g, c in parts], None)
    left, right = grad.values.t(), x.t()
    offset = _shifted(left, shift)
    if left.device.type == "cpu" and limit() < FULL:  # only the second operand's codes are small: that is the gradient
        steps = grad.scales.expand(columns).contiguous()
        return _numbers(right, left, offset[None], steps, *_plain(outputs, steps)).t()
    steps = grad.scales.expand(outputs).contiguous()
    return _numbers(left, right, offset[:, None], steps, *_plain(columns, steps))


def _plain(count: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """No scales and no bias."""
    return like.new_ones(count), like.new_zeros(count)


def _runs(rows: int, depth: int, second: Tensor) -> bool:
    """Whether this device multiplies such integers; CUDA's products want sizes in multiples of 8."""
    if second.device.type == "cpu":
        return missing() is None
    return second.device.type == "cuda" and not depth % 8 and not len(second) % 8 and rows > 16


def _shifted(other: Tensor, shift: int) -> Tensor:
    """What a product lacks if `shift` was left out of one operand, for each row of the other."""
    if not shift:
        return torch.zeros(len(other), dtype=torch.int32, device=other.device)
    return shift * other.sum(1, dtype=torch.int32)


def _numbers(first: Tensor, second: Tensor, offset: Tensor, steps: Tensor, scales: Tensor, bias: Tensor) -> Tensor:
    """(first · secondᵀ + offset)·steps·scales + bias: some rows at a time, so that few integers are in memory."""
    many = max(_AT_ONCE // len(second), _ROWS_AT_ONCE)
    result = torch.empty(len(first), len(second), device=first.device)
    if first.device.type == "cuda":  # its products want both operands with their sums along memory
        first, second = first.contiguous(), second.contiguous()
    for start in range(0, len(first), many):
        part = slice(start, start + many)
        own = offset if len(offset) == 1 else offset[part]
        given = (torch._int_mm(first[part], second.t()), own, steps[part, None], scales[None], bias[None])
        (_FLOATS.compiled if worthwhile(result) else _FLOATS.function)(result[part], *given)
    return result


def _floats(result: Tensor, found: Tensor, offset: Tensor, steps: Tensor, scales: Tensor, bias: Tensor) -> None:
    result.copy_(found + offset).mul_(steps).mul_(scales).add_(bias)


_FLOATS = Compiled(_floats)
_AT_ONCE, _ROWS_AT_ONCE = 1 << 22, 1024  # integers; fewer rows are slower: the other operand is packed each time


def _together(sums: list[Tensor], bias: Tensor | None) -> Tensor:
    whole = torch.stack(sums).sum(0)
    return whole if bias is None else whole + bias


def onednn_conv2d(
    x: Codes, weight: Signed, bias: Tensor | None, stride: Ints, padding: Ints, dilation: Ints, groups: int
) -> Tensor:
    """The convolution, in channels-last memory."""
    values, one = x.values.contiguous(memory_format=torch.channels_last), len(x.scales) == 1
    scale, rest = (float(x.scales), bias) if one else (1.0, None)  # rows with scales of their own are scaled afterwards
    if x.zero:  # oneDNN packs weights several times slower if it has to think of a zero
        values = F.pad(values, (padding[1], padding[1], padding[0], padding[0]), value=x.zero)
        values, padding = values.contiguous(memory_format=torch.channels_last), (0, 0)
        less = weight.values.sum((1, 2, 3), dtype=torch.int32) * weight.scales * (-scale * x.zero)
        rest = less if rest is None else rest + less
    shape = (list(stride), list(padding), list(dilation), groups)
    codes, zeros = weight.values.contiguous(), torch.zeros(weight.values.shape[0], dtype=torch.int32)
    packed = torch.ops.onednn.qconv_prepack(codes, weight.scales, scale, 0, *shape, list(values.shape))
    result: Tensor = torch.ops.onednn.qconv2d_pointwise(
        values, scale, 0, packed, weight.scales, zeros, rest, *shape, 1.0, 0, torch.float32, "none", [], ""
    )
    if one:
        return result
    return result.mul_(x.steps) if bias is None else torch.addcmul(bias.view(-1, 1, 1), result, x.steps)


def conv2d(
    x: Codes,
    weight: Signed,
    bias: Tensor | None,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    groups: int,
    *,
    simulate: bool,
) -> Tensor:
    """By integers where they run, else by floats of the same values."""
    shape = (stride, padding, dilation, groups)
    channels, *kernel = weight.values.shape[1:]
    if simulate or x.values.device.type != "cpu" or missing() is not None or prod(kernel) > DEEP:
        return F.conv2d(x.float(), weight.float(), bias, list(stride), list(padding), list(dilation), groups)
    if channels * prod(kernel) <= DEEP:
        return onednn_conv2d(x, weight, bias, *shape)
    most = DEEP // prod(kernel)
    parts = zip(x.values.unflatten(1, (groups, channels)).split(most, 2), weight.values.split(most, 1), strict=True)
    sums = [
        onednn_conv2d(
            Codes(one.flatten(1, 2), x.scales, x.zero), Signed(other.contiguous(), weight.scales), None, *shape
        )
        for one, other in parts
    ]
    return _together(sums, None if bias is None else bias.view(-1, 1, 1))


def conv2d_weight(
    grad: Codes, x: Codes, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints, *, simulate: bool
) -> Tensor:
    """The gradient of the weight: each shifted view of the input against the output's gradient, as one product.

    Samples are summed, so `grad` has one scale, and the steps of `x` are in it already.
    """
    pixels, shift = signed_bytes(x.values).permute(0, 2, 3, 1), 128 - x.zero
    sides = (0, 0, padding[1], padding[1], padding[0], padding[0])
    padded = F.pad(pixels, sides, value=-shift).contiguous()
    batch, row, column, _ = padded.stride()
    count, outputs, height, width = grad.values.shape
    windows = padded.as_strided(
        (count, height, width, *kernel, pixels.shape[3]),
        (batch, row * stride[0], column * stride[1], row * dilation[0], column * dilation[1], 1),
    )
    rows = Signed(signed_bytes(grad.values).permute(0, 2, 3, 1).reshape(-1, outputs), grad.scales)
    # always a copy: rows that overlap can be a view, which oneDNN misreads
    columns = windows.contiguous().view(count * height * width, -1)
    found = transposed(rows, columns, shift, simulate=simulate)
    return found.reshape(outputs, *kernel, pixels.shape[3]).permute(0, 3, 1, 2)
