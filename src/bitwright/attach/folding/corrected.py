"""Strategy 3: quantize w·γ/σ_run, which moves slowly, and correct the output by σ_run/σ_batch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from bitwright.attach.folding.batch import Batch
from bitwright.attach.folding.fold import Call
from bitwright.attach.markers import snapshot


class Corrected(Batch):
    """Fold with running σ, rescale to that of the batch; the bias is the batch's."""

    def train(self, call: Call) -> Tensor:
        """Convolve for the statistics, then with the deployed weight, then correct."""
        norm: Any = self.norm
        # `observe` updates the running variance, and a compiled backward that computes γ/σ again would take the
        # new one: gradients would be wrong. A snapshot can't be recomputed.
        running = snapshot(norm.running_var)
        mean, variance = self.observe(call)
        shift = self.shift(call, self.factor(variance), mean)
        result = call(self.quantized_weight(call, self.factor(running)), None)
        correction = self.inverse(variance) / self.inverse(running)
        return result * self.over_output(correction, result) + self.over_output(shift, result)
