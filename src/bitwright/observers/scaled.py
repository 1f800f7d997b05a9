"""What observers share that find a scale, not a range: the range from which that scale follows."""

from __future__ import annotations

import torch
from torch import Tensor

from bitwright.attach.grid import SMALLEST
from bitwright.formats import Format


def settled(format: Format, low: Tensor) -> Format:
    """The format that a grid will have: an adaptive sign is settled by the lowest value."""
    return format.unsigned() if format.adasign and bool((low >= 0).all()) else format


def range_of_scale(scale: Tensor, low: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """[n·s, p·s], or for an asymmetric format as many steps from the lowest value on."""
    format = settled(format, low)
    if not format.symmetric:
        span = scale * (format.qmax - format.qmin)
        bottom = torch.maximum(torch.round(low.clamp(max=0.0) / scale) * scale, -span)
        return bottom, bottom + span
    # Negative numbers at an unsigned site are reported by the quantizer, which knows the site.
    return scale * format.qmin if format.signed else low.clamp(max=0.0), scale * format.qmax


def unless_too_small(ends: tuple[Tensor, Tensor], low: Tensor, high: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """The range; the observed one where its scale is below the smallest normal number, which the quantizer refuses."""
    small = torch.maximum(high, -low) / max(format.qmax, -format.qmin) < SMALLEST
    return torch.where(small, low, ends[0]), torch.where(small, high, ends[1])


def unless_zeros(ends: tuple[Tensor, Tensor], low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """The range; an empty one where only zeros were seen, of which the quantizer knows what to do."""
    zeros = (low == 0) & (high == 0)
    return torch.where(zeros, 0.0, ends[0]), torch.where(zeros, 0.0, ends[1])
