"""From a range to a grid (scale, zero point, codes), and how scales lie along a tensor's axes."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from bitwright.attach.compiled import dense
from bitwright.errors import CalibrationError
from bitwright.formats import Format

EPS = float(torch.finfo(torch.float32).eps)


@dataclass(frozen=True)
class Layout:
    """Which elements share a scale: all, those of one index of `axis`, or a block of `group` along `axis`."""

    granularity: str
    axis: int
    group: int = 0

    def check(self, shape: torch.Size, *, site: str) -> None:
        """Blocks must divide their axis: a block that spans two rows would mix their ranges."""
        if self.granularity == "group" and shape[self.axis] % self.group:
            raise CalibrationError(
                f"groups of {self.group} don't divide {shape[self.axis]} elements",
                where=site,
                value=tuple(shape),
                fix="use another group size, or channel",
            )

    def rows(self, x: Tensor) -> Tensor:
        """`x` as a matrix with one row per scale."""
        if self.granularity == "tensor":
            if not x.is_contiguous() and dense(x):  # in the order of memory: `reshape` would copy
                return x.as_strided((1, x.numel()), (x.numel(), 1))
            return x.reshape(1, -1)
        if self.granularity == "channel":
            return x.movedim(self.axis, 0).reshape(x.shape[self.axis], -1)
        return x.movedim(self.axis, -1).reshape(-1, self.group)

    def fold(self, per_row: Tensor, shape: torch.Size) -> Tensor:
        """One value per row (of `rows`) → the shape in which scales are kept: (), (C,) or by blocks."""
        if self.granularity == "tensor":
            return per_row.reshape(())
        if self.granularity == "channel":
            return per_row
        sizes = list(shape)
        axis = self.axis % len(sizes)
        blocks = sizes.pop(axis) // self.group
        return per_row.reshape(*sizes, blocks).movedim(-1, axis).contiguous()

    def spread(self, kept: Tensor, x: Tensor) -> Tensor:
        """Scales in their kept shape → a tensor that broadcasts against `x`."""
        if self.granularity == "tensor":
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
        """(x − mean)/deviation of its row; neither of them gets a gradient."""
        std, mean = torch.std_mean(self.rows(x.detach()), dim=1, correction=0)
        return (x - self.over(mean, x)) / self.over(std.clamp(min=1e-12), x)


def extremes(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest and the highest number of each row."""
    if rows.shape[0] == 1:  # both in one pass
        low, high = torch.aminmax(rows)
        return low[None], high[None]
    # torch needs 30 times as long for `aminmax(dim=1)`
    return rows.amin(dim=1), rows.amax(dim=1)


def is_finite(x: Tensor) -> bool:
    """Whether all numbers are; their sum says so in a fraction of the time, unless it overflows."""
    if x.numel() == 1:
        return isfinite(x.item())
    return bool(x.sum().isfinite()) or bool(x.isfinite().all())


@dataclass(frozen=True)
class Grid:
    """scale and zero point (float32; kept shape) and the lowest and highest code."""

    scale: Tensor
    zero_point: Tensor
    qmin: int
    qmax: int


def grid_from_range(low: Tensor, high: Tensor, format: Format, *, site: str) -> Grid:
    """The smallest scale with which `format` covers [low, high] (and 0) without clipping."""
    low = torch.clamp(low.to(torch.float32), max=0.0)
    high = torch.clamp(high.to(torch.float32), min=0.0)
    if format.adasign and bool((low >= 0).all()):
        format = format.unsigned()
    qmin, qmax = format.qmin, format.qmax
    if not format.symmetric:
        scale = torch.clamp((high - low) / (qmax - qmin), min=EPS)
        zero_point = torch.clamp(qmin - torch.round(low / scale), qmin, qmax)
        return Grid(scale, zero_point, qmin, qmax)
    if format.signed:
        scale = torch.maximum(high / qmax, low / qmin)
    else:
        scale = high / qmax
        if bool((low < -scale).any()):
            raise CalibrationError(
                f"{format} has no codes for negative numbers",
                where=site,
                value=float(low.min()),
                fix=f"use {format.name}/{format.granularity}/asym, or int{format.bits}/…/sym/adasign",
            )
    scale = torch.clamp(scale, min=EPS)
    if format.pot:
        scale = torch.exp2(torch.round(torch.log2(scale)))
    return Grid(scale, torch.zeros_like(scale), qmin, qmax)
