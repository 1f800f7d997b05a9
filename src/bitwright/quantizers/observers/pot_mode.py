"""The power-of-two scale that is the best for most batches."""

from __future__ import annotations

import torch
from torch import Tensor

from bitwright.core.formats import Format
from bitwright.quantizers.grid import extremes
from bitwright.quantizers.observers.minmax import MinMax
from bitwright.quantizers.observers.moments import range_of_scale, unless_too_small, unless_zeros
from bitwright.quantizers.observers.pot_floor import best_exponent


class PotMode(MinMax):
    """Each batch votes for its exponent; the most votes win, the wider range where two have as many."""

    merge = "mean"  # a power of two is made of it again where the format wants one
    by_batch = True
    shows_infinities = False

    def __init__(self, *, format: Format) -> None:
        super().__init__(format=format)
        self.votes: list[Tensor] = []

    def observe(self, rows: Tensor) -> None:
        """One vote per row."""
        super().observe(rows)
        low, high = extremes(rows)
        ones = torch.ones_like(rows, dtype=torch.float64)
        self.votes.append(best_exponent(rows, ones, low, high, self.format))

    def range(self) -> tuple[Tensor, Tensor]:
        """The range of the winner's scale."""
        low, high = super().range()
        finest = (-torch.stack(self.votes)).mode(dim=0).values  # of several, `mode` gives the lowest
        ends = range_of_scale(torch.exp2(-finest), low, self.format)
        return unless_zeros(unless_too_small(ends, low, high, self.format), low, high)
