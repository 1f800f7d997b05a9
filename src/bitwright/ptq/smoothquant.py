"""SmoothQuant: move outliers from activations into weights, which tolerate them better.

The factor of a channel is s = max|x|^α / max|w|^(1−α). Activations are divided by s, weights multiplied by s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from bitwright.ptq.channel_scaling import find_groups, gather, inward, weight_columns
from bitwright.ptq.step import Step, Work, unit_of

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

    def units(self, work: Work) -> Sequence[str]:
        """One unit: a single pass over the data covers all groups."""
        find_groups(work)
        return ["all norms"]

    def run(self, work: Work, unit: str) -> None:
        """Collect the peaks of activations and move the factors."""
        groups = find_groups(work)
        peaks = {group.maker.name: _Peak() for group in groups}
        gather(work, groups, self.batch, peaks)
        for group in groups:
            high = peaks[group.maker.name].high
            if high is None:
                continue
            weights = weight_columns(work, group).abs().amax(dim=0)
            # a common factor of all channels has no effect
            size = unit_of(float(high.max()))
            high = (high / size).clamp(min=_SMALLEST)
            weights = (weights / unit_of(float(weights.max()))).clamp(min=_SMALLEST)
            by = (high**self.alpha / weights ** (1 - self.alpha)).clamp(min=_SMALLEST)
            group.divide(work, inward(by, size))
