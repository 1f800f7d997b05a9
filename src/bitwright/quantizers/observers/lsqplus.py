"""The initial range of LSQ+."""

from __future__ import annotations

import torch
from torch import Tensor

from bitwright.quantizers.observers.base import MomentsObserver


class LsqPlusStart(MomentsObserver):
    """±m, m = max(|μ − 3σ|, |μ + 3σ|); limited to the observed range if the format has a zero point or no sign."""

    def range(self) -> tuple[Tensor, Tensor]:
        low, high = self.ends()
        mean, std = self.mean_std()
        m = torch.maximum((mean - 3 * std).abs(), (mean + 3 * std).abs())
        if not self.format.symmetric:
            return torch.maximum(low, -m), torch.minimum(high, m)
        seen_signed = self.format.signed and not (self.format.adasign and bool((low >= 0).all()))
        return -m if seen_signed else low.clamp(max=0.0), m
