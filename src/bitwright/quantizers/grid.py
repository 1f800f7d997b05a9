"""Grids: compute scale, zero point and codes from a range; layouts of scales; limits for exact accumulators."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from bitwright.core.errors import CalibrationError, Problem
from bitwright.core.formats import Format
from bitwright.quantizers.compiled import dense

SMALLEST = float(torch.finfo(torch.float32).tiny)
"""The smallest scale: the smallest normal float32. Runtimes flush smaller numbers to zero."""
LARGEST = float(torch.finfo(torch.float32).max)
ZEROS = float(torch.finfo(torch.float32).eps)
"""The scale of a row that contains only zeros. Any scale represents them."""
_NEGLIGIBLE = 2.0**-64
_HALF_OCTAVE = 0.70710677  # the largest float32 below √½


@dataclass(frozen=True)
class Layout:
    """Which elements share a scale: all, those with one index of `axis`, or a block of `group` along `axis`.

    With granularity "token", each vector along `axis` has its own scale.
    """

    granularity: str
    axis: int
    group: int = 0

    def check(self, shape: torch.Size, *, site: str) -> None:
        """Check that blocks divide their axis; otherwise a block would span two rows."""
        if self.granularity == "group" and shape[self.axis] % self.group:
            raise CalibrationError(
                f"group size {self.group} doesn't divide {shape[self.axis]} elements",
                where=site,
                value=tuple(shape),
                fix="use another group size, or channel",
                code="group-size",
            )

    def rows(self, x: Tensor) -> Tensor:
        """`x` as a matrix with one row per scale."""
        if self.granularity == "tensor":
            if not x.is_contiguous() and dense(x):  # keep the memory order: `reshape` would copy
                return x.as_strided((1, x.numel()), (x.numel(), 1))
            return x.reshape(1, -1)
        if self.granularity == "channel":
            return x.movedim(self.axis, 0).reshape(x.shape[self.axis], -1)
        if self.granularity == "token":
            return x.movedim(self.axis, -1).flatten(0, -2) if x.dim() > 1 else x.reshape(1, -1)
        return x.movedim(self.axis, -1).reshape(-1, self.group)

    def fold(self, per_row: Tensor, shape: torch.Size) -> Tensor:
        """One value per row (of `rows`) → the shape of scales: (), (C,), by blocks, or 1 along the axis of a token."""
        if self.granularity == "tensor":
            return per_row.reshape(())
        if self.granularity == "channel":
            return per_row
        sizes = list(shape)
        axis = self.axis % len(sizes)
        if self.granularity == "token":
            sizes.pop(axis)
            return per_row.reshape(sizes).unsqueeze(axis)
        blocks = sizes.pop(axis) // self.group
        return per_row.reshape(*sizes, blocks).movedim(-1, axis).contiguous()

    def spread(self, kept: Tensor, x: Tensor) -> Tensor:
        """Stored scales → a tensor that broadcasts against `x`."""
        if self.granularity in ("tensor", "token"):
            return kept
        if self.granularity == "channel":
            sizes = [1] * x.dim()
            sizes[self.axis] = -1
            return kept.reshape(sizes)
        return kept.repeat_interleave(self.group, dim=self.axis)

    def over(self, per_row: Tensor, x: Tensor) -> Tensor:
        """One value per row (of `rows`) → a tensor that broadcasts against `x`."""
        return self.spread(self.fold(per_row, x.shape), x)

    def standardised(self, x: Tensor) -> Tensor:
        """(x − mean)/deviation per row. Mean and deviation get no gradient."""
        rows = self.rows(x.detach())
        unit = size_of(rows)  # squares of very small or large numbers exceed the range of float32
        std, mean = torch.std_mean(rows / unit[:, None], dim=1, correction=0)
        return (x / self.over(unit, x) - self.over(mean, x)) / self.over(std.clamp(min=1e-12), x)


def extremes(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The minimum and maximum of each row."""
    if rows.shape[0] == 1:  # both in one pass
        low, high = torch.aminmax(rows)
        return low[None], high[None]
    # `aminmax(dim=1)` is 30 times slower
    return rows.amin(dim=1), rows.amax(dim=1)


def is_finite(x: Tensor) -> bool:
    """Whether all numbers are finite. Checks the sum first, which is fast and only inconclusive if it overflows."""
    if x.numel() == 1:
        return isfinite(x.item())
    return bool(x.sum().isfinite()) or bool(x.isfinite().all())


@dataclass(frozen=True)
class Grid:
    """Scale and zero point (float32, stored shape) and the lowest and highest code.

    Scales are positive, except in `full` formats.
    """

    scale: Tensor
    zero_point: Tensor
    qmin: int
    qmax: int


def size_of(rows: Tensor) -> Tensor:
    """A power of two near the maximum of each row; 1 for zeros. Dividing by it is exact."""
    exponent = torch.frexp(rows.abs().amax(dim=1))[1].clamp(-125, 126)
    return torch.ldexp(torch.ones_like(exponent, dtype=rows.dtype), exponent)


def power_of_two(scale: Tensor) -> Tensor:
    """The nearest power of two in the log domain. Exact for any exponent, unlike rounding log2(scale)."""
    fraction, exponent = torch.frexp(scale)
    exponent = exponent - (fraction <= _HALF_OCTAVE).to(exponent.dtype)
    return torch.ldexp(torch.ones_like(scale), exponent.clamp(-126, 127))


def scale_of(low: Tensor, high: Tensor, steps: int) -> Tensor:
    """(high − low)/steps. If the difference exceeds float32, it is computed from halved values."""
    span = high - low
    halves = (high * 0.5 - low * 0.5) / steps * 2.0
    return torch.where(span.isfinite(), span / steps, halves)


def grid_from_range(low: Tensor, high: Tensor, format: Format, *, site: str | None = None) -> Grid:
    """The smallest scale with which `format` covers [low, high] (and 0) without clipping.

    A `full` format maps the end with the larger magnitude to its lowest code, and clips the other end after 2^(B−1) − 1
    steps.

    With a `site`, a scale that float32 can't represent raises an error that names it. Without one, it is replaced by
    the nearest valid scale, for observers that try ranges.
    """
    low = torch.clamp(low.to(torch.float32), max=0.0)
    high = torch.clamp(high.to(torch.float32), min=0.0)
    if format.adasign and bool((low >= 0).all()):
        format = format.unsigned()
    qmin, qmax = format.qmin, format.qmax
    if not format.symmetric:
        scale = _usable(scale_of(low, high, qmax - qmin), torch.maximum(high, -low), site)
        zero_point = torch.clamp(qmin - torch.round(low / scale), qmin, qmax)
        return _covered(Grid(scale, zero_point, qmin, qmax), site)
    if format.full:
        reach = torch.maximum(high, -low)
        size = _usable(reach / -qmin, reach, site)
        scale = torch.where(high > -low, -size, size)
    elif format.signed:
        scale = _usable(torch.maximum(high / qmax, low / qmin), torch.maximum(high, -low), site)
    else:
        scale = _usable(high / qmax, high, site)
        if bool((low < -scale).any()):
            raise CalibrationError(
                f"{format} has no codes for negative numbers",
                where=site,
                value=float(low.min()),
                code="negative-numbers",
                fix=f"use {format.name}/{format.granularity}/asym, or int{format.bits}/…/sym/adasign",
            )
    if format.pot:
        scale = power_of_two(scale)
    return _covered(Grid(scale, torch.zeros_like(scale), qmin, qmax), site)


def _usable(scale: Tensor, reach: Tensor, site: str | None) -> Tensor:
    """The scale, replaced or rejected if float32 can't represent it. `reach`: the largest number of each row."""
    if site is not None:
        check_small(scale, reach, site=site)
    return torch.where(reach == 0, ZEROS, scale.clamp(SMALLEST, LARGEST))


def check_small(scale: Tensor, reach: Tensor, *, site: str) -> None:
    """Reject values that are too small for a scale.

    Rows that are negligible compared with the largest one are accepted and rounded to zero: unused channels of a
    trained model may decay to values such as 1e-40.
    """
    small = (reach > 0) & (scale < SMALLEST)
    if bool((reach[small] > negligible(reach)).any()):
        raise CalibrationError(
            "these values are too small: their scale is below the smallest normal float32",
            where=site,
            value=float(reach[small].max()),
            code="scale-underflow",
            fix="multiply the data or the weights by a power of two, or keep this site in float (format: float)",
        )


def _covered(grid: Grid, site: str | None) -> Grid:
    """The grid. Raises an error if its outermost codes represent infinity."""
    if site is not None:
        codes = torch.maximum((grid.qmin - grid.zero_point).abs(), (grid.qmax - grid.zero_point).abs())
        ends = codes * grid.scale
        if not bool(ends.isfinite().all()):
            raise CalibrationError(
                "these values are too large: the ends of their range exceed float32",
                where=site,
                value=float(grid.scale.abs().max()),
                code="scale-overflow",
                fix="divide the data or the weights by a power of two, or keep this site in float (format: float)",
            )
    return grid


def negligible(sizes: Tensor) -> Tensor:
    """The size below which a row is negligible compared with the largest one."""
    return sizes.max() * _NEGLIGIBLE


def product_problem(first: Tensor, second: Tensor, *, where: str) -> Problem | None:
    """Problem of the product of two scales, which integer kernels store as one float32; None if it is valid."""
    product = (first.double() * second.double()).abs()
    if bool((product > LARGEST).any()):
        what, code, way = "exceeds float32", "scale-overflow", "divide"
    elif bool((product[product < SMALLEST] > negligible(product)).any()):
        what, code, way = "is below the smallest normal float32", "scale-underflow", "multiply"
    else:
        return None
    return Problem(
        what=f"the product of the input and weight scales {what}",
        where=where,
        value=float(product.max()),
        fix=f"{way} the data or the weights by a power of two, or keep this site in float (format: float)",
        code=code,
    )


_PAIR_LIMIT = 128  # 255 · 128 = 32640 ≤ 32767
# Rounding may add half a code to each of the two values.
_SAFE_SUM = _PAIR_LIMIT - 1


def _summed_last(weight: Tensor, kind: str) -> Tensor:
    """The weight as (output channel, kernel position, input channel)."""
    if kind.startswith("conv_transpose"):  # its input channels are the first axis
        weight = weight.transpose(0, 1)
    if kind.startswith("conv"):
        return weight.movedim(1, -1).reshape(weight.shape[0], -1, weight.shape[1])
    if kind in ("matmul", "addmm"):
        return weight.reshape(-1, *weight.shape[-2:]).transpose(-1, -2).reshape(-1, 1, weight.shape[-2])
    return weight.reshape(weight.shape[0], 1, -1)


def _worst_pair(rows: Tensor) -> Tensor:
    """The largest |a + b| over pairs (0, 1), (2, 3), … of the last axis with equal signs, per first axis.

    For pairs with different signs, the larger magnitude is used, because |a + b| is smaller than that.
    """
    if rows.shape[-1] % 2:
        rows = torch.nn.functional.pad(rows, (0, 1))
    return torch.maximum(_largest(rows[..., 0::2] + rows[..., 1::2]), _largest(rows))


def _largest(rows: Tensor) -> Tensor:
    """max |x| per first axis. Two reductions avoid the copy that |x| would need."""
    rest = tuple(range(1, rows.dim()))
    return torch.maximum(rows.amax(dim=rest), -rows.amin(dim=rest))


def _worst(rows: Tensor) -> Tensor:
    """The maximum over both ways to pair channels; an even number of channels has only one way."""
    within = _worst_pair(rows)
    return within if rows.shape[-1] % 2 == 0 else torch.maximum(within, _worst_pair(rows.flatten(1)))


def needed_scale(guard: str, rows: Tensor) -> Tensor:
    """The smallest scale per output channel that satisfies the guard. `rows`: (output, position, input channel)."""
    assert guard == "int16-pairs"  # plan validation rejects other guards
    return _worst(rows) / _SAFE_SUM


def guarded_scale(guard: str, scale: Tensor, weight: Tensor, *, kind: str, layout: Layout) -> Tensor:
    """The scale, raised where the guard requires it."""
    needed = needed_scale(guard, _summed_last(weight, kind))
    if layout.granularity != "channel" or needed.shape != scale.shape:
        needed = needed.amax()
    return torch.where(scale < 0, -torch.maximum(-scale, needed), torch.maximum(scale, needed))


def holds(guard: str, codes: Tensor, *, kind: str) -> bool:
    """Whether a weight's codes satisfy the guard. Training may have changed them since calibration."""
    assert guard == "int16-pairs"
    rows = _summed_last(codes.double(), kind)
    return bool((_worst(rows) <= _PAIR_LIMIT).all())
