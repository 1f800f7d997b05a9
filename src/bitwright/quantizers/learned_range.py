"""Quantizers that learn the scale or the ends of their range: LSQ, LSQ+, TQT and PACT.

LSQ learns the scale, with its gradient scaled by 1/√(M·p), and LSQ+ also the zero point. TQT learns a power-of-two
threshold in the log domain. PACT learns the ends of the range from the gradients of clipped values.
"""

from __future__ import annotations

from dataclasses import replace
from math import log2
from typing import Any

import torch
from torch import Tensor

from bitwright.core.errors import CalibrationError
from bitwright.quantizers.base import Quantizer
from bitwright.quantizers.grid import Grid, scale_of
from bitwright.quantizers.rounding import can_fold, round_folded, round_to_grid, usable_scale, with_gradient_of

_LOWEST, _HIGHEST = -126.0, 127.0  # exponents of the normal numbers of float32


class Lsq(Quantizer):
    """Learned step size: ∂s = g·{n−z below; p−z above; (x̂−x)/s inside}, g = 1/√(M·p), M elements per scale.

    If the format requires powers of two, every forward rounds the scale to one.
    The observer `lsq` gives the published initial value, s = 2·mean|x|/√p.
    """

    learned = ("scale",)
    lengths = ("scale",)
    own_kernels = True
    signed_scales = True

    def quantize(self, x: Tensor, *, relu: bool = False) -> Tensor:
        """Round to the grid of the learned scale (and zero point, if it is learned)."""
        grid, factor = self.grid_for(x), self.gradient_scale(x)
        grid = replace(grid, zero_point=with_gradient_of(grid.zero_point, self.zero_point, factor))
        if self.spec.format.full:  # the gradient of the scale itself, not of its magnitude
            grid = replace(grid, scale=with_gradient_of(grid.scale, self.scale, factor))
            return round_to_grid(x, grid, self.layout, relu=relu)
        return round_to_grid(x, grid, self.layout, learned=self.scale, factor=factor, relu=relu, fused=self.compiled)

    def quantize_relu(self, x: Tensor) -> Tensor:
        return self.quantize(x, relu=True)

    def quantize_folded(self, weight: Tensor, factor: Tensor) -> Tensor | None:
        return round_folded(self, weight, factor) if can_fold(self, weight) else None

    def grid(self) -> Grid:
        """The grid with the effective scale."""
        scale = usable_scale(self.scale, pot=self.spec.format.pot, signed=self.spec.format.full)
        return Grid(scale, self.zero_point.detach(), self.qmin, self.qmax)


class LsqPlus(Lsq):
    """LSQ with ∂z = g·{−s where clipped; 0 inside}. A symmetric format has no zero point to learn.

    The parameter is a real number. Every forward and the artefact round it to an integer code.
    The observer `lsqplus` gives the published initial value, from |μ ± 3σ|.
    """

    learned_if_asymmetric = ("zero_point",)

    def invalid_state(self) -> str | None:
        """A zero point far from all codes. Training moves it only slightly beyond them."""
        most = self.qmax - self.qmin
        far = (self.zero_point < self.qmin - most) | (self.zero_point > self.qmax + most)
        return "zero_point" if bool(far.any()) else None

    def grid(self) -> Grid:
        """The grid with the zero point rounded to a code."""
        grid = super().grid()
        zero_point = torch.clamp(torch.round(grid.zero_point), grid.qmin, grid.qmax)
        return Grid(grid.scale, zero_point, grid.qmin, grid.qmax)


class Tqt(Quantizer):
    """s = 2^⌈log2 t⌉ / (p+1): ∂log2 t = s·ln 2·{n below; p above; round(x/s) − x/s inside}; ⌈·⌉ is straight-through.

    The scale is always a power of two, in any format.
    """

    learned = ("log2_threshold",)
    symmetric_only = True
    own_kernels = True
    log2_threshold: Tensor

    @torch.no_grad()
    def set_grid(self, grid: Grid) -> None:
        """Set the threshold that gives this grid. The scale is rounded up to a power of two."""
        super().set_grid(grid)
        fraction, exponent = torch.frexp(grid.scale)
        ceiling = exponent - (fraction == 0.5).to(exponent.dtype) + log2(grid.qmax + 1)
        if bool((ceiling > _HIGHEST).any()):
            raise CalibrationError(
                "these values are too large: their power-of-two threshold exceeds float32",
                where=self.site,
                value=float(grid.scale.max()),
                code="scale-overflow",
                fix="divide the data or the weights by a power of two, or keep this site in float (format: float)",
            )
        threshold = torch.log2(grid.scale * (grid.qmax + 1))
        # for large exponents, float32 can't distinguish the logarithms of a power of two and of the next number
        self.keep("log2_threshold", torch.where(torch.ceil(threshold) == ceiling, threshold, ceiling))

    def _scale(self) -> Tensor:
        levels = log2(self.qmax + 1)
        exponent = torch.ceil(self.log2_threshold).clamp(_LOWEST + levels, _HIGHEST) - levels
        return torch.exp2(with_gradient_of(exponent, self.log2_threshold))

    def invalid_state(self) -> str | None:
        """Thresholds with a scale that isn't a normal number."""
        exponent = torch.ceil(self.log2_threshold)
        fits = (exponent >= _LOWEST + log2(self.qmax + 1)) & (exponent <= _HIGHEST)
        return None if bool(fits.all()) else "log2_threshold"

    def quantize(self, x: Tensor) -> Tensor:
        """Round to the grid of the threshold."""
        grid = Grid(self._scale(), self.zero_point, self.qmin, self.qmax)
        return round_to_grid(x, grid, self.layout, fused=self.compiled)

    def grid(self) -> Grid:
        """The grid of the threshold."""
        return Grid(self._scale().detach(), self.zero_point, self.qmin, self.qmax)


class LearnedRange(Quantizer):
    """Learns `high` and `low`, which define the grid. A symmetric range is ±|high|, or [0, |high|]."""

    learned = ("high",)
    learned_if_asymmetric = ("low",)
    lengths = ("high", "low")
    balanced = True
    high: Tensor
    low: Tensor

    @torch.no_grad()
    def set_grid(self, grid: Grid) -> None:
        """Use the ends of this grid."""
        super().set_grid(grid)
        self.keep("high", (self.qmax - grid.zero_point) * grid.scale)
        self.keep("low", (self.qmin - grid.zero_point) * grid.scale)

    def ends(self) -> tuple[Tensor, Tensor]:
        """The effective ends with the gradients of the learned ones. They always include zero."""
        if not self.spec.format.symmetric:
            low = with_gradient_of(self.low.clamp(max=0.0), self.low)
            return low, with_gradient_of(self.high.clamp(min=0.0), self.high)
        high = with_gradient_of(self.grid().scale * self.qmax, self.high.abs())
        return (-high if self.qmin < 0 else torch.zeros_like(high)), high

    def invalid_state(self) -> str | None:
        """An empty range."""
        if self.spec.format.symmetric:
            return "high" if bool((self.high == 0).any()) else None
        low, high = (end.detach() for end in self.ends())
        return "high" if bool((high == low).any()) else None

    def grid(self) -> Grid:
        """The grid between the current ends."""
        if self.spec.format.symmetric:
            scale = usable_scale(self.high / self.qmax, pot=self.spec.format.pot)
            return Grid(scale, torch.zeros_like(scale), self.qmin, self.qmax)
        low, high = (end.detach() for end in self.ends())
        scale = usable_scale(scale_of(low, high, self.qmax - self.qmin), pot=False)
        zero_point = torch.clamp(self.qmin - torch.round(low / scale), self.qmin, self.qmax)
        return Grid(scale, zero_point, self.qmin, self.qmax)


class Pact(LearnedRange):
    """Clip to [0 or −α, α] (asymmetric: [low, α]), then round: ∂α = 1 above, −1 below (symmetric), 0 inside.

    α, stored as `high`, starts at the calibrated end of the range, at most `alpha`. Weights use DoReFa.
    """

    weight_partner = "dorefa"

    def __init__(self, *args: Any, alpha: float = 6.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.alpha = alpha

    def set_range(self, low: Tensor, high: Tensor, shape: torch.Size, values: Tensor | None = None) -> None:
        """Start with at most α."""
        super().set_range(low.clamp(min=-self.alpha), high.clamp(max=self.alpha), shape, values)

    def quantize(self, x: Tensor) -> Tensor:
        """Round to the grid between the ends, with the gradient of clipping."""
        low, high = (self.layout.spread(end, x) for end in self.ends())
        return with_gradient_of(round_to_grid(x.detach(), self.grid(), self.layout), torch.clamp(x, low, high))
