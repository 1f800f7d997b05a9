"""Strategy 2: a first convolution gives the statistics of the batch; fold with those, quantize, convolve again.

Training sees a weight that is rounded as w·γ/σ_batch: its grid moves with each batch.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from bitwright.attach.folding.fold import Call, Fold
from bitwright.attach.folding.statistics import batch_statistics, update_running


class Batch(Fold):
    """Fold with batch μ and σ."""

    def train(self, call: Call) -> Tensor:
        """Convolve for the statistics, then with the folded weight."""
        mean, variance = self.observe(call)
        factor = self.factor(variance)
        return call(self.quantized_weight(call, factor), self.shift(call, factor, mean))

    def norm_in_training(self, x: Tensor) -> Tensor:
        """Nothing: the operator has normalised already."""
        return x

    def observe(self, call: Call) -> tuple[Tensor, Tensor]:
        """Mean and variance of what the norm would be given; they also go into the running ones."""
        norm: Any = self.norm
        mean, variance, count = batch_statistics(norm, call(call.weight, None), sync=self.sync)
        if call.bias is not None:
            # it cancels in the output, but the running mean has it, and DDP waits for its gradient (zero)
            mean = mean + call.bias
        update_running(norm, mean, variance, count, counted=False)
        return mean, variance
