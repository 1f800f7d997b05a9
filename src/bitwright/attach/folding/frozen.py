"""Strategy 1: the statistics are frozen, γ and β train: training computes what is deployed."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from bitwright.attach.folding.fold import Call, Fold


class Frozen(Fold):
    """Fold with running μ and σ at each step."""

    def train(self, call: Call) -> Tensor:
        """As in eval mode, with gradients."""
        return self.deployed(call)

    def norm_in_training(self, x: Tensor) -> Tensor:
        """Nothing: the operator has done it all."""
        norm: Any = self.norm
        if norm.num_batches_tracked is not None:
            # the norm's forward has counted a batch that no statistic took in
            norm.num_batches_tracked.sub_(1)
        return x
