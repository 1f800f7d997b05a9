"""The power-of-two scale that is best for most batches."""

from __future__ import annotations

import torch
from torch import Tensor

from bitwright.core.formats import Format
from bitwright.quantizers.grid import extremes
from bitwright.quantizers.observers.base import RangeObserver, empty_if_zeros, observed_if_too_small, range_of_scale
from bitwright.quantizers.observers.pot_floor import best_exponent


class PotMode(RangeObserver):
    """Each batch votes for an exponent. The majority wins; ties are resolved in favour of the wider range."""

    def __init__(self, *, format: Format) -> None:
        super().__init__(format=format)
        self.votes: list[Tensor] = []

    def observe(self, rows: Tensor) -> None:
        super().observe(rows)
        low, high = extremes(rows)
        ones = torch.ones_like(rows, dtype=torch.float64)
        self.votes.append(best_exponent(rows, ones, low, high, self.format))

    def range(self) -> tuple[Tensor, Tensor]:
        """The range of the winning scale."""
        low, high = self.ends()
        finest = (-torch.stack(self.votes)).mode(dim=0).values  # for ties, `mode` returns the lowest
        ends = range_of_scale(torch.exp2(-finest), low, self.format)
        return empty_if_zeros(observed_if_too_small(ends, low, high, self.format), low, high)
