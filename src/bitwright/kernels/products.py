"""Products of codes: in integers by what this machine is fast at, or the same numbers in float."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from bitwright.kernels.codes import EXACT, FULL, Codes, Signed, as_second, signed_bytes

Ints = Sequence[int]
DEEP = 1 << 16
"""Longer sums of products might not fit into int32: 255·127·66,312 doesn't."""


@cache
def missing() -> str | None:
    """Why integer products can't be run on this CPU; None if they can."""
    if not torch.backends.mkldnn.is_available():
        return "torch was built without oneDNN"
    for name in ("qlinear_pointwise", "qconv2d_pointwise"):
        if not hasattr(torch.ops.onednn, name):
            return f"this torch has no onednn::{name}"
    return None


def onednn_linear(x: Codes, weight: Signed, bias: Tensor | None) -> Tensor:
    """x · weightᵀ + bias."""
    rows = x.values.reshape(-1, x.values.shape[-1])
    count = weight.values.shape[0]
    packed = torch.ops.onednn.qlinear_prepack(weight.values, list(rows.shape))
    zeros = torch.zeros(count, dtype=torch.int32)
    scale, rest = _first(x, bias)
    result: Tensor = torch.ops.onednn.qlinear_pointwise(
        rows, scale, x.zero, packed, weight.scales, zeros, rest, 1.0, 0, torch.float32, "none", [], ""
    )
    return _scaled(result.view(*x.values.shape[:-1], count), x, bias)


def onednn_conv2d(
    x: Codes, weight: Signed, bias: Tensor | None, stride: Ints, padding: Ints, dilation: Ints, groups: int
) -> Tensor:
    """The convolution, in channels-last memory."""
    values = x.values.contiguous(memory_format=torch.channels_last)
    shape = (list(stride), list(padding), list(dilation), groups)
    scale, rest = _first(x, bias)
    packed = torch.ops.onednn.qconv_prepack(weight.values, weight.scales, scale, x.zero, *shape, list(values.shape))
    zeros = torch.zeros(weight.values.shape[0], dtype=torch.int32)
    result: Tensor = torch.ops.onednn.qconv2d_pointwise(
        values, scale, x.zero, packed, weight.scales, zeros, rest, *shape, 1.0, 0, torch.float32, "none", [], ""
    )
    return _scaled(result, x, None if bias is None else bias.view(-1, 1, 1))


def _first(x: Codes, bias: Tensor | None) -> tuple[float, Tensor | None]:
    """What oneDNN does by itself: one scale and the bias. Rows with scales of their own are scaled afterwards."""
    return (float(x.scales), bias) if len(x.scales) == 1 else (1.0, None)


def _scaled(result: Tensor, x: Codes, bias: Tensor | None) -> Tensor:
    if len(x.scales) == 1:
        return result
    return result.mul_(x.steps) if bias is None else torch.addcmul(bias, result, x.steps)


@cache
def limit() -> int:
    """The largest code of the second operand with which this CPU's products are exact: found by a product."""
    ones = torch.full((16, 64), 255, dtype=torch.uint8)
    rows = torch.full((16, 64), FULL, dtype=torch.int8)
    result = onednn_linear(Codes(ones, torch.ones(1), 0), Signed(rows, torch.ones(16)), None)
    return FULL if bool((result == 255.0 * FULL * 64).all()) else EXACT


def linear(x: Codes, weight: Signed, bias: Tensor | None, *, simulate: bool) -> Tensor:
    """By integers where they run, else by floats of the same values."""
    run = None if simulate else _integers(x.values.device.type)
    if run is None:
        return F.linear(x.float(), weight.float(), bias)
    if x.values.shape[-1] <= DEEP:
        return run(x, weight, bias)
    parts = zip(x.values.split(DEEP, -1), weight.values.split(DEEP, -1), strict=True)
    sums = [
        run(Codes(one.contiguous(), x.scales, x.zero), Signed(other.contiguous(), weight.scales), None)
        for one, other in parts
    ]
    return _together(sums, bias)


def _together(sums: list[Tensor], bias: Tensor | None) -> Tensor:
    whole = torch.stack(sums).sum(0)
    return whole if bias is None else whole + bias


def _integers(device: str) -> Callable[[Codes, Signed, Tensor | None], Tensor] | None:
    """What multiplies integers on such a device."""
    if device == "cpu":
        return onednn_linear if missing() is None else None
    return _int_mm if device == "cuda" else None


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
    channels, outputs = x.values.shape[1], grad.values.shape[1]
    turned = x.values.permute(1, 0, 2, 3)  # channels first: rows of the product
    sides = (padding[1], padding[1], padding[0], padding[0])
    padded = F.pad(turned.contiguous(), sides, value=x.zero)
    first, batch, row, column = padded.stride()
    height, width = grad.values.shape[2:]
    windows = padded.as_strided(
        (channels, *kernel, x.values.shape[0], height, width),
        (first, row * dilation[0], column * dilation[1], batch, row * stride[0], column * stride[1]),
    )
    columns = Codes(windows.reshape(channels * kernel[0] * kernel[1], -1), torch.ones_like(grad.scales), x.zero)
    rows = as_second(grad.values.permute(1, 0, 2, 3).reshape(outputs, -1), grad)
    found = linear(columns, rows, None, simulate=simulate)
    return found.view(channels, *kernel, outputs).permute(3, 0, 1, 2).contiguous()


def _int_mm(x: Codes, weight: Signed, bias: Tensor | None) -> Tensor:
    """torch._int_mm wants signed codes, so 128 is taken from all and given back, and sizes in multiples of 8."""
    rows = x.values.reshape(-1, x.values.shape[-1])
    count, depth, columns = rows.shape[0], rows.shape[1], weight.values.shape[0]
    if depth % 8 or columns % 8 or count <= 16:
        return F.linear(x.float(), weight.float(), bias)
    found = torch._int_mm(signed_bytes(rows), weight.values.t())
    if x.zero != 128:
        found += (128 - x.zero) * weight.values.sum(1, dtype=torch.int32)
    result = found.to(torch.float32) * (x.scales[:, None] * weight.scales)
    result = result.view(*x.values.shape[:-1], columns)
    return result if bias is None else result + bias
