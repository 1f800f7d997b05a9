"""Convolutions of 8-bit codes, and their gradients, as products of matrices that are never stored.

A row is a pixel of the result, a column is an output channel, and a term is a tap of the kernel and an input channel.
The gradient of the input is one such convolution for each remainder of a pixel's position divided by the stride: these
pixels share their taps. In the gradient of the weight, a row is a tap and an input channel, and a term is a pixel.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitwright.kernels.products import Ints, output_size
from bitwright.kernels.triton.gemm import MOST, Activation, centered, finish, multiply
from bitwright.kernels.triton.launch import Tile, are_aligned, multiplies_halves, on_device, splits, tile_for

if TYPE_CHECKING:
    from bitwright.kernels.codes import Codes, Signed


@triton.jit
def convolution_kernel(
    x,
    weight,
    out,
    zero,
    offset,
    steps,
    scales,
    bias,
    pixels,
    columns,
    depth,
    channels,
    taps,
    out_height,
    out_width,
    height,
    width,
    x_sample,
    x_row,
    x_column,
    weight_out,
    weight_row,
    weight_column,
    out_sample,
    out_row,
    out_column,
    begin_row,
    begin_column,
    stride_row,
    stride_column,
    tap_row,
    tap_column,
    step_stride,
    HALF: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """One tile of a group of channels. Channels are contiguous in memory; terms are (tap row, tap column, channel)."""
    wide = tl.cdiv(columns, COLUMNS)
    group = tl.program_id(1)
    pixel = (tl.program_id(0) // wide) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % wide) * COLUMNS + tl.arange(0, COLUMNS)
    sample = pixel // (out_height * out_width)
    place = pixel % (out_height * out_width)
    down, right = place // out_width, place % out_width
    from_row = down * stride_row + begin_row
    from_column = right * stride_column + begin_column
    source = x + sample.to(tl.int64) * x_sample + group * channels
    around = tl.load(zero).to(tl.uint8)  # the code of zero, also outside the image
    kernel = weight + (group * columns + column) * weight_out
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.int32)
    for start in range(0, depth, DEPTH):
        term = start + tl.arange(0, DEPTH)
        channel, tap = term % channels, term // channels
        row = from_row[:, None] + (tap // taps * tap_row)[None, :]
        col = from_column[:, None] + (tap % taps * tap_column)[None, :]
        inside = (row >= 0) & (row < height) & (col >= 0) & (col < width)
        inside &= (pixel < pixels)[:, None] & (term < depth)[None, :]
        values = tl.load(source[:, None] + row * x_row + col * x_column + channel[None, :], mask=inside, other=around)
        position = tap // taps * weight_row + tap % taps * weight_column + channel
        known = (term < depth)[:, None] & (column < columns)[None, :]
        other = tl.load(kernel[None, :] + position[:, None], mask=known, other=0)
        sums = multiply(centered(values), other, sums, HALF)
    valid = column < columns
    output = group * columns + column
    shift = tl.load(bias + output, mask=valid, other=0.0) if HAS_BIAS else 0.0
    result = finish(
        sums,
        tl.load(offset + output, mask=valid, other=0),
        tl.load(steps + sample * step_stride, mask=pixel < pixels, other=0.0),
        tl.load(scales + output, mask=valid, other=0.0),
        shift,
        HAS_BIAS,
        ACTIVATION,
    )
    at = sample.to(tl.int64) * out_sample + down * out_row + right * out_column
    tl.store(out + at[:, None] + output[None, :], result, mask=(pixel < pixels)[:, None] & valid[None, :])


@triton.jit
def weight_gradient_kernel(
    x,
    grad,
    out,
    zero,
    offset,
    scales,
    terms,
    columns,
    pixels,
    length,
    channels,
    taps,
    out_height,
    out_width,
    height,
    width,
    x_sample,
    x_row,
    x_column,
    outputs,
    begin_row,
    begin_column,
    stride_row,
    stride_column,
    tap_row,
    tap_column,
    HALF: tl.constexpr,
    PARTIAL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Taps and input channels × output channels, summed over a part of the pixels."""
    wide = tl.cdiv(columns, COLUMNS)
    group, part = tl.program_id(1), tl.program_id(2)
    term = (tl.program_id(0) // wide) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % wide) * COLUMNS + tl.arange(0, COLUMNS)
    channel, tap = term % channels, term // channels
    row_shift = tap // taps * tap_row + begin_row
    column_shift = tap % taps * tap_column + begin_column
    around = tl.load(zero).to(tl.uint8)
    output = group * columns + column
    end = tl.minimum(part * length + length, pixels)
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.int32)
    for start in range(part * length, end, DEPTH):
        pixel = start + tl.arange(0, DEPTH)
        sample, place = pixel // (out_height * out_width), pixel % (out_height * out_width)
        row = row_shift[:, None] + (place // out_width * stride_row)[None, :]
        col = column_shift[:, None] + (place % out_width * stride_column)[None, :]
        inside = (row >= 0) & (row < height) & (col >= 0) & (col < width)
        inside &= (term < terms)[:, None] & (pixel < end)[None, :]
        source = x + sample.to(tl.int64) * x_sample + group * channels
        at = source[None, :] + row * x_row + col * x_column + channel[:, None]
        values = tl.load(at, mask=inside, other=around)
        from_grad = grad + pixel.to(tl.int64)[:, None] * outputs + output[None, :]
        other = tl.load(from_grad, mask=(pixel < end)[:, None] & (column < columns)[None, :], other=128)
        sums = multiply(centered(values), centered(other), sums, HALF)
    mask = (term < terms)[:, None] & (column < columns)[None, :]
    at = output.to(tl.int64)[None, :] * terms + term[:, None]
    if PARTIAL:
        tl.store(out + part.to(tl.int64) * outputs * terms + at, sums, mask=mask)
    else:
        shift = tl.load(offset + output, mask=column < columns, other=0)
        result = (sums + shift[None, :]).to(tl.float32) * tl.load(scales)
        tl.store(out + at, result, mask=mask)


def _last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _zero(x: Codes) -> Tensor:
    zero = x.zero
    return zero if isinstance(zero, Tensor) else torch.tensor(zero, dtype=torch.int32, device=x.values.device)


def conv2d(
    x: Codes,
    weight: Signed,
    bias: Tensor | None,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    groups: int,
    *,
    activation: Activation = "none",
) -> Tensor:
    """The convolution, in channels-last memory format."""
    samples, _, *image = x.values.shape
    outputs, _, *kernel = weight.values.shape
    result = _image(samples, outputs, output_size(image, kernel, stride, padding, dilation), x.values.device)
    offset = weight.values.sum((1, 2, 3), dtype=torch.int32) * (128 - x.zero)
    origin, taps = [-side for side in padding], weight.values.permute(0, 2, 3, 1).contiguous()
    _convolve(x, taps, weight.scales, offset, bias, result, origin, stride, dilation, groups, activation)
    return result


def _image(samples: int, channels: int, size: Ints, device: torch.device) -> Tensor:
    return torch.empty(samples, *size, channels, device=device).permute(0, 3, 1, 2)


def conv2d_input(
    grad: Codes, weight: Signed, image: Ints, stride: Ints, padding: Ints, dilation: Ints, groups: int
) -> Tensor:
    """The gradient of the input, which has the size `image`. `grad` is signed.

    `weight` is (in, out/groups, …): its rows belong to the input channels, and its kernels are not rotated.
    """
    channels, _, *kernel = weight.values.shape
    result = _image(len(grad.values), channels, image, grad.values.device)
    taps = weight.values.permute(0, 2, 3, 1).contiguous()
    offset = torch.zeros(channels, dtype=torch.int32, device=taps.device)  # the codes are centered
    rows, columns = (
        [_phase(*sizes, remainder) for remainder in range(sizes[0])]
        for sizes in zip(stride, padding, dilation, kernel, strict=True)
    )
    for from_row, (row, every_row, begin_row, step_row) in enumerate(rows):
        for from_column, (column, every_column, begin_column, step_column) in enumerate(columns):
            own = result[:, :, from_row :: stride[0], from_column :: stride[1]]
            if not own.numel():
                continue
            picked = taps[:, row::every_row, column::every_column]
            begin, step = (begin_row, begin_column), (step_row, step_column)
            _convolve(grad, picked, weight.scales, offset, None, own, begin, (1, 1), step, groups, "none")
    return result


def _phase(stride: int, padding: int, dilation: int, kernel: int, remainder: int) -> tuple[int, int, int, int]:
    """For every `stride`th pixel: the first of its taps, and their distance; the first pixel of `grad`, and its step.

    Pixel i receives tap r of output o if i + padding = stride·o + dilation·r.

    >>> _phase(2, 1, 1, 3, 0), _phase(2, 1, 1, 3, 1)
    ((1, 2, 0, -1), (0, 2, 1, -1))
    """
    every = stride // gcd(stride, dilation)
    first = next((r for r in range(min(every, kernel)) if not (remainder + padding - dilation * r) % stride), None)
    if first is None:
        return kernel, every, 0, 0  # no tap
    return first, every, (remainder + padding - dilation * first) // stride, -(every * dilation // stride)


def _convolve(
    x: Codes,
    taps: Tensor,
    scales: Tensor,
    offset: Tensor,
    bias: Tensor | None,
    result: Tensor,
    begin: Ints,
    stride: Ints,
    step: Ints,
    groups: int,
    activation: Activation,
) -> None:
    """`taps` is (out, rows, columns, in/groups). `result` may be every n-th pixel of an image."""
    outputs, tall, wide, channels = taps.shape
    samples, _, *size = result.shape
    values, device = _last(x.values), taps.device
    pixels, columns, depth = samples * size[0] * size[1], outputs // groups, tall * wide * channels

    def run(tile: Tile) -> None:
        programs = triton.cdiv(pixels, tile.rows) * triton.cdiv(columns, tile.columns)
        convolution_kernel[programs, groups](
            values,
            taps,
            result,
            _zero(x),
            offset,
            x.scales,
            scales,
            scales if bias is None else bias,
            pixels,
            columns,
            depth,
            channels,
            max(wide, 1),
            *size,
            *values.shape[2:],
            values.stride(0),
            *values.stride()[2:],
            *taps.stride()[:3],
            result.stride(0),
            *result.stride()[2:],
            *begin,
            *stride,
            *step,
            1 if len(x.scales) > 1 else 0,
            HALF=multiplies_halves(device),
            HAS_BIAS=bias is not None,
            ACTIVATION=activation,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            DEPTH=tile.depth,
            **tile.options,
        )

    with on_device(device):
        aligned = are_aligned(channels)
        run(tile_for("convolution", (pixels, columns, depth, groups), device, run, aligned=aligned))


def conv2d_weight(
    grad: Codes, x: Codes, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints, groups: int
) -> Tensor:
    """The gradient of the weight. Samples are summed: `grad` is signed with one scale that includes those of `x`."""
    values, gradients, device = _last(x.values), _last(grad.values), x.values.device
    samples, outputs, *size = gradients.shape
    channels, pixels = values.shape[1] // groups, samples * size[0] * size[1]
    terms, columns = kernel[0] * kernel[1] * channels, outputs // groups
    offset = (gradients.sum((0, 2, 3), dtype=torch.int64) - 128 * pixels) * (128 - x.zero)
    result = torch.empty(outputs, *kernel, channels, device=device)

    def run(tile: Tile) -> None:
        programs = triton.cdiv(terms, tile.rows) * triton.cdiv(columns, tile.columns)
        parts, length = splits(programs * groups, pixels, tile, device, MOST)
        split = parts > 1
        out = torch.empty(parts, *result.shape, dtype=torch.int32, device=device) if split else result
        weight_gradient_kernel[programs, groups, parts](
            values,
            gradients,
            out,
            _zero(x),
            offset if split else offset.to(torch.int32),
            grad.scales,
            terms,
            columns,
            pixels,
            length,
            channels,
            kernel[1],
            *size,
            *values.shape[2:],
            values.stride(0),
            *values.stride()[2:],
            outputs,
            -padding[0],
            -padding[1],
            *stride,
            *dilation,
            HALF=multiplies_halves(device),
            PARTIAL=split,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            DEPTH=tile.depth,
            **tile.options,
        )
        if split:
            sums = out.sum(0, dtype=torch.int64).add_(offset.view(-1, 1, 1, 1))
            result.copy_(sums.to(torch.float32).mul_(grad.scales))

    with on_device(device):
        aligned = are_aligned(channels, columns)
        run(tile_for("weight-gradient", (terms, columns, pixels, groups), device, run, aligned=aligned))
    return result.permute(0, 3, 1, 2)
