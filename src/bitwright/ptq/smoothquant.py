"""SmoothQuant: move outliers from activations into weights, which tolerate them better.

The factor of a channel is s = max|x|^α / max|w|^(1−α). Activations are divided by s, weights multiplied by s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from bitwright.ptq.channel_scaling import collect_statistics, find_groups, limit_scaling, weight_columns
from bitwright.ptq.step import PtqContext, Step, magnitude_unit

_SMALLEST = 1e-5


class _Peak:
    def __init__(self) -> None:
        self.high: Tensor | None = None

    def see(self, rows: Tensor) -> None:
        high = rows.abs().amax(dim=0)
        self.high = high if self.high is None else torch.maximum(self.high, high)


class SmoothQuant(Step):
    """Balance the channels of activations that linear operators read (transformers); one pass over the data."""

    name: ClassVar[str] = "smoothquant"
    needs_ranges: ClassVar[bool] = False

    alpha: float = Field(
        default=0.5, ge=0, le=1, description="0 leaves activations unchanged, 1 equalizes all their channels."
    )
    batch: int = Field(default=32, ge=1, description="Samples per batch.")

    def units(self, context: PtqContext) -> Sequence[str]:
        """One unit: a single pass over the data covers all groups."""
        find_groups(context)
        return ["all norms"]

    def run(self, context: PtqContext, unit: str) -> None:
        """Collect the peaks of activations and move the factors."""
        groups = find_groups(context)
        peaks = {group.maker.name: _Peak() for group in groups}
        collect_statistics(context, groups, self.batch, peaks)
        for group in groups:
            high = peaks[group.maker.name].high
            if high is None:
                continue
            weights = weight_columns(context, group).abs().amax(dim=0)
            # a common factor of all channels has no effect
            size = magnitude_unit(float(high.max()))
            high = (high / size).clamp(min=_SMALLEST)
            weights = (weights / magnitude_unit(float(weights.max()))).clamp(min=_SMALLEST)
            by = (high**self.alpha / weights ** (1 - self.alpha)).clamp(min=_SMALLEST)
            group.divide(context, limit_scaling(by, size))
