"""Encode rows of floats as 8-bit codes: the largest values, then the codes.

The codes are those of `bitwright.kernels.products` on a CPU, also with stochastic rounding: its noise is a hash of the
position and the seed. `tl.rand` would be another generator.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitwright.kernels.triton.launch import interpreted, on_device

_NUMBERS = 2048
"""Elements per program."""
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


@triton.jit
def ranges_kernel(
    x,
    low,
    high,
    rows,
    width,
    row_stride,
    stride,
    parts,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The smallest and largest value of a part of each row; NaN if there is one."""
    row = (tl.program_id(0) // parts) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(0) % parts
    column = part * WIDTH + tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    at = row.to(tl.int64)[:, None] * row_stride + column.to(tl.int64)[None, :] * stride
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    # hardware minima ignore NaN
    invalid = tl.max(((values != values) & inside).to(tl.int32), axis=1) > 0
    least = tl.min(tl.where(inside, values, float("inf")), axis=1)
    most = tl.max(tl.where(inside, values, float("-inf")), axis=1)
    where = row * parts + part
    tl.store(low + where, tl.where(invalid, float("nan"), least), mask=row < rows)
    tl.store(high + where, tl.where(invalid, float("nan"), most), mask=row < rows)


@triton.jit(do_not_specialize=["seed"])
def codes_kernel(
    x,
    scales,
    zero,
    codes,
    rows,
    width,
    row_stride,
    stride,
    scale_stride,
    parts,
    seed,
    limit,
    STOCHASTIC: tl.constexpr,
    SIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The codes, at the positions of the values. `scales` are inverse, except for signed codes."""
    row = (tl.program_id(0) // parts) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % parts) * WIDTH + tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    at = row.to(tl.int64)[:, None] * row_stride + column.to(tl.int64)[None, :] * stride
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    steps = tl.load(scales + row * scale_stride, mask=row < rows, other=1.0)[:, None]
    if SIGNED:
        levels = tl.div_rn(values, tl.broadcast_to(steps, values.shape))
    else:
        levels = values * steps + tl.load(zero).to(tl.float32)
    if STOCHASTIC:
        bits = at.to(tl.uint32) + seed.to(tl.uint32)
        bits = (bits ^ (bits >> 16)) * 0x45D9F3B
        bits = (bits ^ (bits >> 15)) * 0x2C1B3C6D
        bits = bits ^ (bits >> 16)
        levels = tl.floor(levels + (bits & 0xFFFFFF).to(tl.int32).to(tl.float32) * (1.0 / 16777216))
    else:
        # to the nearest, ties to even: floats of this size have no fractions
        levels = (tl.minimum(tl.maximum(levels, -1024.0), 1024.0) + 12582912.0) - 12582912.0
    levels = tl.where(levels == levels, levels, 0.0)  # codes of rows with NaN have no meaning
    if SIGNED:
        result = tl.minimum(tl.maximum(levels, -limit), limit).to(tl.int32).to(tl.int8)
    else:
        result = tl.minimum(tl.maximum(levels, 0.0), 255.0).to(tl.int32).to(tl.uint8)
    tl.store(codes + at, result, mask=inside)


def _blocks(x: Tensor) -> tuple[int, int, int]:
    """Rows and columns per program, and programs per row."""
    rows, width = x.shape
    across, most = x.stride(1) != 1 and width > 1, 256 if interpreted() else _NUMBERS
    most_columns = min(32, most) if across and rows > 1 else most
    columns = min(triton.next_power_of_2(width), most_columns)
    return min(triton.next_power_of_2(rows), most // columns), columns, -(-width // columns)


def ranges(x: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and largest value of each row of a matrix."""
    rows, columns, parts = _blocks(x)
    low, high = (torch.empty(x.shape[0], parts, device=x.device) for _ in range(2))
    grid = (-(-x.shape[0] // rows) * parts,)
    with on_device(x.device):
        ranges_kernel[grid](x, low, high, *x.shape, *x.stride(), parts, ROWS=rows, WIDTH=columns, **_OPTIONS)
    return low.amin(1), high.amax(1)


def codes(x: Tensor, scales: Tensor, zero: Tensor, seed: int | None = None) -> Tensor:
    """Unsigned codes of a matrix whose rows have these scales, rounded to nearest or, with a seed, stochastically."""
    return _codes(x, 1.0 / scales, zero, torch.uint8, seed=seed)


def signed_codes(x: Tensor, scales: Tensor, limit: int) -> Tensor:
    """Signed codes of a matrix whose rows have these scales, within ±`limit`."""
    return _codes(x, scales, scales, torch.int8, limit=limit)


def _codes(
    x: Tensor, scales: Tensor, zero: Tensor, dtype: torch.dtype, *, seed: int | None = None, limit: int = 0
) -> Tensor:
    result = torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=x.device)
    rows, columns, parts = _blocks(x)
    grid = (-(-x.shape[0] // rows) * parts,)
    mixed = ((seed or 0) & 0x7FFFFFFF) * 0x61C88647 & 0xFFFFFFFF
    with on_device(x.device):
        codes_kernel[grid](
            x,
            scales,
            zero,
            result,
            *x.shape,
            *x.stride(),
            scales.stride(0) if len(scales) > 1 else 0,
            parts,
            mixed - (1 << 32) if mixed >> 31 else mixed,  # int32, for every seed
            float(limit),
            STOCHASTIC=seed is not None,
            SIGNED=dtype == torch.int8,
            ROWS=rows,
            WIDTH=columns,
            **_OPTIONS,
        )
    return result
