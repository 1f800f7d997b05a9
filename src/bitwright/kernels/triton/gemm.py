"""Encode matrices as 8-bit codes, and multiply them.

The largest values of rows are found first, then the codes. They are those of `bitwright.kernels.products` on a CPU,
also with stochastic rounding: its noise is a hash of the position and the seed. `tl.rand` would be another generator.
The sums of products are exact integers; the scales, the bias and an activation follow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from bitwright.kernels.triton.launch import Tile, are_aligned, multiplies_halves, on_device, splits, tile_for

if TYPE_CHECKING:
    from bitwright.kernels.codes import Codes, Signed
from bitwright.kernels.triton.launch import interpreted

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


Activation = Literal["none", "relu", "gelu"]
ACTIVATIONS: tuple[Activation, ...] = ("none", "relu", "gelu")
_GROUP = 8
"""Row blocks that share columns: programs that run at the same time read the same operands."""


@triton.jit
def centered(codes):
    """Unsigned codes minus 128."""
    return (codes ^ 128).to(tl.int8, bitcast=True)


@triton.jit
def multiply(a, b, sums, HALF: tl.constexpr):
    """sums + a · b. HALF: with float16 products, which Triton has on Turing. Sums of 2¹¹ codes are exact in float32."""
    if HALF:
        return sums + tl.dot(a.to(tl.float16), b.to(tl.float16), out_dtype=tl.float32).to(tl.int32)
    return tl.dot(a, b, sums, out_dtype=tl.int32)


@triton.jit
def finish(sums, offset, steps, scales, bias, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr):
    """Floats of integer sums, in the order of the CPU kernel."""
    values = (sums + offset[None, :]).to(tl.float32) * steps[:, None] * scales[None, :]
    if HAS_BIAS:
        values += bias[None, :]
    if ACTIVATION == "relu":
        values = tl.where(values < 0, 0.0, values)  # NaN stays
    elif ACTIVATION == "gelu":
        values = 0.5 * values * (1.0 + tl.erf(values * 0.7071067811865476))
    return values


@triton.jit
def gemm_kernel(
    a,
    b,
    out,
    offset,
    steps,
    scales,
    bias,
    rows,
    columns,
    depth,
    length,
    a_row,
    a_term,
    b_column,
    b_term,
    out_part,
    out_row,
    out_column,
    step_stride,
    HALF: tl.constexpr,
    B_UNSIGNED: tl.constexpr,
    PARTIAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """a · bᵀ: `a` has unsigned codes. PARTIAL: integer sums of a part of the depth, otherwise floats."""
    tall, wide = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    program, part = tl.program_id(0), tl.program_id(1)
    first = program // (GROUP * wide) * GROUP
    height = tl.minimum(tall - first, GROUP)
    row = (first + program % (GROUP * wide) % height) * ROWS + tl.arange(0, ROWS)
    column = (program % (GROUP * wide) // height) * COLUMNS + tl.arange(0, COLUMNS)
    term = part * length + tl.arange(0, DEPTH)
    end = tl.minimum(part * length + length, depth)
    left = a + row.to(tl.int64)[:, None] * a_row + term.to(tl.int64)[None, :] * a_term
    right = b + column.to(tl.int64)[None, :] * b_column + term.to(tl.int64)[:, None] * b_term
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.int32)
    for start in range(part * length, end, DEPTH):
        inside = start + tl.arange(0, DEPTH) < end
        one = tl.load(left, mask=(row < rows)[:, None] & inside[None, :], other=128)
        if B_UNSIGNED:
            other = centered(tl.load(right, mask=(column < columns)[None, :] & inside[:, None], other=128))
        else:
            other = tl.load(right, mask=(column < columns)[None, :] & inside[:, None], other=0)
        sums = multiply(centered(one), other, sums, HALF)
        left += DEPTH * a_term
        right += DEPTH * b_term
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    at = row.to(tl.int64)[:, None] * out_row + column.to(tl.int64)[None, :] * out_column
    if PARTIAL:
        tl.store(out + part.to(tl.int64) * out_part + at, sums, mask=mask)
    else:
        valid = column < columns
        shift = tl.load(bias + column, mask=valid, other=0.0) if HAS_BIAS else 0.0
        result = finish(
            sums,
            tl.load(offset + column, mask=valid, other=0),
            tl.load(steps + row * step_stride, mask=row < rows, other=0.0),
            tl.load(scales + column, mask=valid, other=0.0),
            shift,
            HAS_BIAS,
            ACTIVATION,
        )
        tl.store(out + at, result, mask=mask)


def activate(values: Tensor, activation: Activation) -> Tensor:
    """The activation of `finish`, after a product that was split."""
    if activation == "relu":
        return values.relu_()
    return F.gelu(values) if activation == "gelu" else values


def linear(
    x: Codes, weight: Signed, bias: Tensor | None, *, activation: Activation = "none", tune: bool = True
) -> Tensor:
    """activation(x · weightᵀ + bias)."""
    depth = x.values.shape[-1]
    rows = x.values.reshape(-1, depth)
    offset = weight.values.sum(1, dtype=torch.int32) * (128 - x.zero)
    result = torch.empty(len(rows), len(weight.values), device=rows.device)
    _product(rows, weight.values, offset, x.scales, weight.scales, bias, result, activation, tune=tune)
    return result.view(*x.values.shape[:-1], len(weight.values))


def transposed(grad: Codes, x: Codes) -> Tensor:
    """gradᵀ · x, summed over rows. `grad` is signed with one scale that includes the scales of `x`."""
    count, outputs = grad.values.shape
    result = torch.empty(outputs, x.values.shape[1], device=x.values.device)
    offset = (grad.values.sum(0, dtype=torch.int64) - 128 * count) * (128 - x.zero)
    scales = grad.scales.expand(outputs).contiguous()
    _product(x.values.t(), grad.values.t(), offset, torch.ones_like(grad.scales), scales, None, result.t())
    return result


def _product(
    a: Tensor,
    b: Tensor,
    offset: Tensor,
    steps: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    result: Tensor,
    activation: Activation = "none",
    *,
    tune: bool = True,
) -> None:
    (rows, depth), columns, device = a.shape, len(b), a.device
    unsigned = b.dtype == torch.uint8

    def run(tile: Tile) -> None:
        programs = triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns)
        parts, length = splits(programs, depth, tile, device, MOST)
        split = parts > 1
        out = torch.empty(parts, rows, columns, dtype=torch.int32, device=device) if split else result[None]
        gemm_kernel[programs, parts](
            a,
            b,
            out,
            offset if split else offset.to(torch.int32),
            steps,
            scales,
            scales if bias is None else bias,
            rows,
            columns,
            depth,
            length,
            *a.stride(),
            *b.stride(),
            *out.stride(),
            1 if len(steps) > 1 else 0,
            HALF=multiplies_halves(device),
            B_UNSIGNED=unsigned,
            PARTIAL=split,
            HAS_BIAS=bias is not None,
            ACTIVATION=activation,
            GROUP=_GROUP,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            DEPTH=tile.depth,
            **tile.options,
        )
        if split:
            sums = out.sum(0, dtype=torch.int64).add_(offset).to(torch.float32).mul_(steps[:, None]).mul_(scales)
            result.copy_(activate(sums if bias is None else sums.add_(bias), activation))

    order = f"{'t' if a.stride(1) != 1 else 'n'}{'t' if b.stride(1) != 1 else 'n'}"
    lengths = rows if order[0] == "t" else depth, columns if order[1] == "t" else depth
    aligned = are_aligned(*a.stride(), *b.stride(), *lengths)
    with on_device(device):
        run(tile_for(f"gemm-{order}", (rows, columns, depth), device, run, aligned=aligned, tune=tune))


MOST = 1 << 16
"""Terms of a sum in int32: 255·127·66,312 exceeds it."""
