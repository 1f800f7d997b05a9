"""Products of 8-bit codes, with integer instructions, or simulated in float with the same values.

oneDNN multiplies on CPUs, Triton and cuBLAS on CUDA devices. Triton has no 8-bit products for Turing: cuBLAS runs those
of suitable sizes there, also convolutions, with the pixels of each window copied into a row.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from bitwright.kernels.codes import EXACT, FULL, Codes, Signed, signed_bytes
from bitwright.kernels.triton import launch
from bitwright.quantizers.compiled import CompiledKernel as Compiled
from bitwright.quantizers.compiled import is_worthwhile

Ints = Sequence[int]
DEEP = 1 << 16
"""Longer sums of products may exceed int32: 255·127·66,312 does."""


@cache
def missing() -> str | None:
    """Why this CPU can't run integer products; None if it can."""
    if not torch.backends.mkldnn.is_available():
        return "torch was built without oneDNN"
    if not hasattr(torch.ops.onednn, "qconv2d_pointwise"):
        return "this torch has no onednn::qconv2d_pointwise"
    return None


def engine(device: torch.device) -> str | None:
    """The library that multiplies codes on this device; None: products are simulated.

    >>> engine(torch.device("meta")) is None
    True
    """
    if launch.missing(device) is None:
        return "cuBLAS and Triton" if launch.multiplies_halves(device) else "Triton"
    if device.type == "cpu":
        return "oneDNN" if missing() is None else None
    return "cuBLAS" if device.type == "cuda" else None


def gradients_of_all_convolutions(device: torch.device) -> bool:
    """Whether codes are multiplied in both gradients of every convolution, also with strides and groups."""
    return launch.missing(device) is None


def second_limit(device: torch.device) -> int:
    """The largest code of the second operand on this device."""
    return limit() if engine(device) == "oneDNN" else FULL


@cache
def limit() -> int:
    """The largest code of the second operand for exact products on this CPU, found by a test product."""
    ones = torch.full((16, 64), FULL, dtype=torch.int8)
    return FULL if bool((torch._int_mm(ones, ones.t()) == FULL * FULL * 64).all()) else EXACT


def linear(x: Codes, weight: Signed, bias: Tensor | None, *, simulate: bool) -> Tensor:
    """x · weightᵀ + bias, with integers where supported, otherwise with floats of the same values."""
    depth = x.values.shape[-1]
    runs = _runs(x.values.numel() // depth, depth, weight.values)
    if not simulate and _in_triton(x.values, runs):
        from bitwright.kernels.triton import gemm

        return gemm.linear(x, weight, bias)
    if simulate or not runs:
        return F.linear(x.float(), weight.float(), bias)
    if depth > DEEP:
        parts = zip(x.values.split(DEEP, -1), weight.values.split(DEEP, -1), strict=True)
        sums = [
            linear(Codes(one, x.scales, x.zero), Signed(other, weight.scales), None, simulate=False)
            for one, other in parts
        ]
        return _together(sums, bias)
    rows = x.values.reshape(-1, depth)
    offset = _shifted(weight.values.sum(1, dtype=torch.int32), x)[None]
    steps = x.scales.expand(len(rows)).contiguous()
    shift = torch.zeros_like(weight.scales) if bias is None else bias
    result = torch.empty(len(rows), len(weight.values), device=rows.device)
    for part in _parts(rows, result.shape[1]):  # limits the size of the integer buffer
        found = _multiplied(signed_bytes(rows[part]), weight.values, passing=True)
        _to_floats(result[part], found, offset, steps[part, None], weight.scales[None], shift[None])
    return result.view(*x.values.shape[:-1], len(weight.values))


def transposed(grad: Codes, x: Codes, *, simulate: bool) -> Tensor:
    """gradᵀ · x, summed over rows. `grad` is signed with one scale that includes the scales of `x`."""
    count, outputs = grad.values.shape
    runs = _runs(outputs, count, x.values.t())
    if not simulate and _in_triton(x.values, runs):
        from bitwright.kernels.triton import gemm

        return gemm.transposed(grad, x)
    if simulate or not runs:
        return grad.float().t() @ (x.values.to(torch.float32) - x.zero)
    if count > DEEP:
        parts = zip(grad.values.split(DEEP), x.values.split(DEEP), strict=True)
        sums = [transposed(Codes(g, grad.scales, 128), Codes(c, x.scales, x.zero), simulate=False) for g, c in parts]
        return _together(sums, None)
    # if products saturate, the codes of the second operand must be small: that is the gradient
    turned = grad.values.device.type == "cpu" and limit() < FULL
    found = None
    for part in _parts(grad.values, outputs + x.values.shape[1]):
        own, other = signed_bytes(grad.values[part]).t(), signed_bytes(x.values[part]).t()
        more = _multiplied(other, own).t() if turned else _multiplied(own, other)
        found = more if found is None else found.add_(more)
    assert found is not None  # there is at least one row
    offset = _shifted(grad.values.sum(0, dtype=torch.int32) - 128 * count, x)[:, None]
    result = torch.empty_like(found, dtype=torch.float32)
    one = grad.scales.new_ones(1, 1)
    _to_floats(result, found, offset, grad.scales.view(1, 1), one, torch.zeros_like(one))
    return result


def _runs(rows: int, depth: int, second: Tensor) -> bool:
    """Whether this device multiplies integers of these sizes. CUDA requires multiples of 8."""
    if second.device.type == "cpu":
        return missing() is None
    return second.device.type == "cuda" and not depth % 8 and not len(second) % 8 and rows > 16


def _in_triton(values: Tensor, runs_elsewhere: bool) -> bool:
    """Whether Triton multiplies. On Turing, cuBLAS does if it can (`runs_elsewhere`)."""
    if launch.missing(values.device) is not None:
        return False
    return not (runs_elsewhere and launch.multiplies_halves(values.device))


def _shifted(sums: Tensor, x: Codes) -> Tensor:
    """The correction for `x`'s codes minus 128, from the sums of the other operand."""
    return sums * (128 - x.zero)


def _parts(rows: Tensor, width: int) -> list[slice]:
    """Split rows on a CPU. Very small parts are slower, because the other operand is packed for each."""
    if rows.device.type != "cpu":  # CUDA's size requirements would exclude the last part
        return [slice(None)]
    many = max(_AT_ONCE // width, _ROWS_AT_ONCE)
    return [slice(start, start + many) for start in range(0, len(rows), many)]


def _multiplied(first: Tensor, second: Tensor, *, passing: bool = False) -> Tensor:
    """first · secondᵀ in integers. `passing`: the result is overwritten by the next call."""
    if first.device.type == "cuda":  # requires both operands with a contiguous reduction axis
        first, second = first.contiguous(), second.contiguous()
    if not passing or first.device.type == "cuda":
        return torch._int_mm(first, second.t())
    return torch._int_mm(first, second.t(), out=_space(len(first), len(second)))


class _Own(threading.local):
    space: Tensor | None = None


_OWN = _Own()


def _space(rows: int, columns: int) -> Tensor:
    """A buffer per thread. New blocks of this size would fragment memory: about 5 % of a process."""
    count = rows * columns
    if count > _KEPT:
        return torch.empty(rows, columns, dtype=torch.int32)
    if _OWN.space is None or _OWN.space.numel() < count:
        with torch.inference_mode(False):  # an inference tensor couldn't be written to in training
            _OWN.space = torch.empty(count, dtype=torch.int32)
    return _OWN.space[:count].view(rows, columns)


def _to_floats(result: Tensor, *given: Tensor) -> None:
    (_FLOATS.compiled if is_worthwhile(result) else _FLOATS.function)(result, *given)


def _floats(result: Tensor, found: Tensor, offset: Tensor, steps: Tensor, scales: Tensor, bias: Tensor) -> None:
    result.copy_(found + offset).mul_(steps).mul_(scales).add_(bias)


_FLOATS = Compiled(_floats)
_AT_ONCE, _ROWS_AT_ONCE, _KEPT = 1 << 20, 1024, 1 << 22  # integers, rows, integers


def _together(sums: list[Tensor], bias: Tensor | None) -> Tensor:
    whole = torch.stack(sums).sum(0)
    return whole if bias is None else whole + bias


def onednn_conv2d(
    x: Codes, weight: Signed, bias: Tensor | None, stride: Ints, padding: Ints, dilation: Ints, groups: int
) -> Tensor:
    """The convolution, in channels-last memory format."""
    values, one = x.values.contiguous(memory_format=torch.channels_last), len(x.scales) == 1
    scale, rest = (float(x.scales), bias) if one else (1.0, None)  # scales per row are applied afterwards
    if x.zero:  # oneDNN packs weights several times slower for a nonzero zero point
        values = F.pad(values, (padding[1], padding[1], padding[0], padding[0]), value=int(x.zero))
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


def output_size(image: Ints, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints) -> list[int]:
    """The size of a convolution's output.

    >>> output_size((7, 8), (3, 3), (2, 1), (1, 0), (1, 2))
    [4, 4]
    """
    return [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(image, kernel, stride, padding, dilation, strict=True)
    ]


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
    """Convolve with integers where supported, otherwise with floats of the same values."""
    shape = (stride, padding, dilation, groups)
    channels, *kernel = weight.values.shape[1:]
    pixels = x.values.numel() // x.values.shape[1] // prod(stride)
    unfolds = x.values.is_cuda and groups == 1 and _runs(pixels, channels * prod(kernel), weight.values)
    if not simulate and _in_triton(x.values, unfolds) and channels * prod(kernel) <= DEEP:
        from bitwright.kernels.triton import convolution

        return convolution.conv2d(x, weight, bias, *shape)
    if not simulate and unfolds:
        return unfolded_conv2d(x, weight, bias, stride, padding, dilation)
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


def unfolded_conv2d(
    x: Codes, weight: Signed, bias: Tensor | None, stride: Ints, padding: Ints, dilation: Ints
) -> Tensor:
    """The convolution as one product of matrices: each window is a row."""
    windows = _windows(x, weight.values.shape[2:], stride, padding, dilation)
    samples, height, width = windows.shape[:3]
    steps = x.scales.expand(samples).repeat_interleave(height * width)
    rows = Codes(windows.contiguous().view(len(steps), -1), steps, x.zero)
    columns = weight.values.permute(0, 2, 3, 1).reshape(len(weight.values), -1)
    found = linear(rows, Signed(columns, weight.scales), bias, simulate=False)
    return found.view(samples, height, width, -1).permute(0, 3, 1, 2)


def _windows(x: Codes, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints) -> Tensor:
    """(sample, row, column, kernel row, kernel column, channel), as a view of the image with its padding."""
    pixels = x.values.permute(0, 2, 3, 1)
    if isinstance(x.zero, Tensor):  # reading it would wait for the device
        (samples, height, width, channels), (above, before) = pixels.shape, padding
        size = (samples, height + 2 * above, width + 2 * before, channels)
        padded = x.zero.to(torch.uint8).expand(size).contiguous()
        padded[:, above : above + height, before : before + width] = pixels
    else:
        padded = F.pad(pixels, (0, 0, padding[1], padding[1], padding[0], padding[0]), value=x.zero).contiguous()
    batch, row, column, _ = padded.stride()
    windows = output_size(pixels.shape[1:3], kernel, stride, padding, dilation)
    return padded.as_strided(
        (len(padded), *windows, *kernel, padded.shape[3]),
        (batch, row * stride[0], column * stride[1], row * dilation[0], column * dilation[1], 1),
    )


def conv2d_input(
    grad: Codes,
    turned: Signed,
    image: Ints,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    groups: int,
    *,
    simulate: bool,
) -> Tensor:
    """The gradient of the input, of size `image`. `turned` is (in, out/groups, …), with rotated kernels."""
    around = [d * (k - 1) - p for d, k, p in zip(dilation, turned.values.shape[2:], padding, strict=True)]
    is_plain = all(s == 1 for s in stride) and min(around) >= 0
    if not simulate and _in_triton(grad.values, is_plain):
        from bitwright.kernels.triton import convolution

        weight = Signed(turned.values.flip(2, 3), turned.scales)
        return convolution.conv2d_input(grad, weight, image, stride, padding, dilation, groups)
    if is_plain:
        return conv2d(grad, turned, None, (1, 1), around, dilation, groups, simulate=simulate)
    blank = grad.scales.new_empty(()).expand(len(grad.values), len(turned.values), *image)  # only its shape is used
    return _in_float(grad, blank, turn(turned.float(), groups), stride, padding, dilation, groups, wanted=0)


def _in_float(
    grad: Codes,
    x: Tensor,
    weight: Tensor,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    groups: int,
    *,
    wanted: int,
) -> Tensor:
    """The gradient of the input (`wanted` = 0) or of the weight (1)."""
    shape, mask = (list(stride), list(padding), list(dilation)), [wanted == 0, wanted == 1, False]
    values = grad.float()
    found = torch.ops.aten.convolution_backward(values, x, weight, None, *shape, False, [0, 0], groups, mask)
    gradient: Tensor = found[wanted]
    return gradient


def turn(weight: Tensor, groups: int) -> Tensor:
    """(out, in/groups, …) → (in, out/groups, …), with each kernel rotated by 180 degrees. It is its own inverse."""
    out, per_group = weight.shape[:2]
    parts = weight.view(groups, out // groups, per_group, *weight.shape[2:]).transpose(1, 2)
    return parts.reshape(groups * per_group, out // groups, *weight.shape[2:]).flip(2, 3)


def conv2d_weight(
    grad: Codes,
    x: Codes,
    kernel: Ints,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    groups: int = 1,
    *,
    simulate: bool,
) -> Tensor:
    """The gradient of the weight: each shifted view of the input times the output's gradient, as one product.

    Samples are summed, so `grad` has one scale that includes the scales of `x`.
    """
    outputs, channels = grad.values.shape[1], x.values.shape[1]
    pixels = grad.values.numel() // outputs
    runs = groups == 1 and _runs(outputs, pixels, grad.values.new_empty(()).expand(channels * prod(kernel), 1))
    if not simulate and _in_triton(x.values, runs):
        from bitwright.kernels.triton import convolution

        return convolution.conv2d_weight(grad, x, kernel, stride, padding, dilation, groups)
    if groups > 1:
        blank = grad.scales.new_empty(()).expand(outputs, channels // groups, *kernel)
        plain = x.values.to(torch.float32) - x.zero  # the scales are in `grad`
        return _in_float(grad, plain, blank, stride, padding, dilation, groups, wanted=1)
    rows = Codes(grad.values.permute(0, 2, 3, 1).reshape(-1, outputs), grad.scales, grad.zero)
    # always copy: overlapping rows can be a view, which oneDNN reads incorrectly
    windows = _windows(x, kernel, stride, padding, dilation)
    found = transposed(rows, Codes(windows.contiguous().view(pixels, -1), x.scales, x.zero), simulate=simulate)
    return found.reshape(outputs, *kernel, channels).permute(0, 3, 1, 2)
