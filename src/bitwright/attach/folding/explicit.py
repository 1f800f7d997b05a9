"""Strategy 4: quantize w·γ/σ_run, convolve, divide by γ/σ_run, and let the norm itself run on the batch.

One convolution, the rounding of deployment, and gradients and statistics that are those of training.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitwright.attach.folding.collective import syncs
from bitwright.attach.folding.fold import Call, Fold, wide
from bitwright.attach.folding.statistics import batch_statistics, update_running
from bitwright.attach.markers import snapshot

_SMALLEST = 1e-30  # a dead channel (γ = 0) must not divide by zero


class Explicit(Fold):
    """Fold for rounding only."""

    def train(self, call: Call) -> Tensor:
        """The operator's own output, but for the rounding."""
        norm: Any = self.norm
        # The norm updates its variance later in the same forward, and a compiled backward that computes γ/σ again
        # would take the new one: gradients would be wrong. A snapshot can't be recomputed.
        compiling = torch.compiler.is_compiling()
        factor = self.factor(snapshot(norm.running_var) if compiling else norm.running_var)
        safe = torch.where(factor.abs() < _SMALLEST, 1.0, factor)
        # Dividing the rounded weight divides the output, which is larger by far.
        weight = call.quantize_weight(wide(call.weight), factor=self.spread(safe, call.weight))
        return call(weight, call.bias)

    def norm_in_training(self, x: Tensor) -> Tensor | None:
        """The norm itself, or its formulas: where processes share statistics, and where torch can't compile it."""
        norm: Any = self.norm
        # Without a momentum the norm hands its operator a number that a compiler doesn't know: 1/(batches so far).
        if norm.momentum is not None and not (self.sync and syncs(norm)):
            return None
        mean, variance, count = batch_statistics(norm, x, sync=self.sync)
        update_running(norm, mean, variance, count, counted=True)
        factor = self.factor(variance)
        _, beta = self.affine()
        shift = -mean * factor if beta is None else beta - mean * factor
        return x * self.over_output(factor, x) + self.over_output(shift, x)
