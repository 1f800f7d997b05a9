"""Ranges from means and deviations: the initial ranges of LSQ and LSQ+, and clip-std."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

from bitwright.core.errors import BitwrightError
from bitwright.core.formats import Format
from bitwright.quantizers.observers.base import MomentsObserver, range_of_scale, resolved_sign


class LsqStart(MomentsObserver):
    """s = 2·mean|x|/√p over all batches.

    If an asymmetric format has too few steps of this size for all data, its range is placed around zero and shifted
    towards the side with the larger values. If it started at the lowest value, one outlier could clip all others.
    """

    def range(self) -> tuple[Tensor, Tensor]:
        low, high = self.ends()
        scale = 2 * self.mean_abs() / sqrt(resolved_sign(self.format, low).qmax)
        zeros = scale == 0  # only zeros were observed; the quantizer handles an empty range
        bottom, top = self._covered(torch.where(zeros, 1.0, scale), low, high)
        return torch.where(zeros, 0.0, bottom), torch.where(zeros, 0.0, top)

    def _covered(self, scale: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        if self.format.symmetric:
            return range_of_scale(scale, low, self.format)
        span = scale * (self.format.qmax - self.format.qmin)
        bottom = torch.maximum(low.clamp(max=0.0), torch.minimum(-span / 2, high.clamp(min=0.0) - span))
        bottom = torch.round(bottom / scale) * scale
        return bottom, bottom + span


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


class ClipStd(MomentsObserver):
    """μ ± k·σ over all batches (k = 2.6), within the observed range."""

    def __init__(self, *, format: Format, deviations: float = 2.6) -> None:
        super().__init__(format=format)
        if deviations <= 0:
            raise BitwrightError("deviations must be positive", value=deviations, fix="2.6", code="invalid-options")
        self.deviations = deviations

    def range(self) -> tuple[Tensor, Tensor]:
        low, high = self.ends()
        mean, std = self.mean_std()
        return torch.maximum(low, mean - self.deviations * std), torch.minimum(high, mean + self.deviations * std)
