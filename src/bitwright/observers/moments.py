"""What observers share that need means: sums over all batches, in float64, beside the ends."""

from __future__ import annotations

import torch
from torch import Tensor

from bitwright.formats import Format
from bitwright.observers.minmax import MinMax


class MomentsObserver(MinMax):
    """Lowest and highest value, and the sums of |x|, x and x²."""

    merge = "mean"  # ranges follow from means, not from the ends
    shows_infinities = False

    def __init__(self, *, format: Format) -> None:
        super().__init__(format=format)
        self.count = 0
        self.sums: Tensor | None = None  # of |x|, x, x²; one column per row of data

    def observe(self, rows: Tensor) -> None:
        """Add a batch."""
        super().observe(rows)
        exact = rows.double()
        sums = torch.stack([exact.abs().sum(dim=1), exact.sum(dim=1), exact.square().sum(dim=1)])
        self.sums = sums if self.sums is None else self.sums + sums
        self.count += rows.shape[1]

    def mean_abs(self) -> Tensor:
        """mean |x|."""
        assert self.sums is not None
        return (self.sums[0] / self.count).float()

    def mean_std(self) -> tuple[Tensor, Tensor]:
        """μ and σ (of the population)."""
        assert self.sums is not None
        mean = self.sums[1] / self.count
        variance = (self.sums[2] / self.count - mean.square()).clamp(min=0.0)
        return mean.float(), variance.sqrt().float()
