"""Quantizers with a uniform grid that isn't trained: plain rounding, dynamic scales, DSQ, and biases.

A bias of integer kernels is int32, with the product of the input and weight scales.
"""

from __future__ import annotations

from math import log
from typing import Any

import torch
from torch import Tensor

from bitwright.core.errors import BitwrightError, CalibrationError, UncalibratedError
from bitwright.core.formats import Format
from bitwright.quantizers.base import Quantizer
from bitwright.quantizers.grid import LARGEST, SMALLEST, Grid, extremes, grid_from_range, product_problem
from bitwright.quantizers.rounding import round_to_grid, with_gradient_of

_MIN_STEPS = 2.0**10  # the minimum number of steps for the bias
_MAX_BIAS_CODE = 2.0**30  # accumulators are int32: the bias may use half of the range


class Plain(Quantizer):
    """x̂ = (clamp(round(x/s) + z, n, p) − z)·s, ∂x̂/∂x = 1 inside the range and 0 outside."""

    own_kernels = True
    signed_scales = True

    def quantize(self, x: Tensor, *, relu: bool = False) -> Tensor:
        """Round to the grid."""
        return round_to_grid(x, self.grid(), self.layout, relu=relu, half=True, fused=self.compiled)

    def quantize_relu(self, x: Tensor) -> Tensor:
        return self.quantize(x, relu=True)


class Dynamic(Quantizer):
    """Rounds to the grid of the range of each tensor or token. Nothing is clipped, so the gradient is 1.

    It has no state and needs no calibration.
    """

    @classmethod
    def supports(cls, format: Format) -> bool:
        """Integer formats with scales that are computed at run time."""
        return format.dynamic and format.minifloat is None

    def grid(self) -> Grid:
        """Raise an error, because the grid depends on the values."""
        raise UncalibratedError(
            "a dynamic site has no stored grid: its scales depend on each input",
            where=self.site,
            value=str(self.format),
            fix="use `grid_for(x)`, or a format without dynamic",
            code="dynamic-grid",
        )

    @torch.no_grad()
    def grid_for(self, x: Tensor) -> Grid:
        """The grid of these values."""
        low, high = extremes(self.layout.rows(x.detach().to(torch.float32)))
        grid = grid_from_range(low, high, self.spec.format)
        scale, zero_point = (self.layout.fold(per_row, x.shape) for per_row in (grid.scale, grid.zero_point))
        return Grid(scale, zero_point, grid.qmin, grid.qmax)

    def quantize(self, x: Tensor) -> Tensor:
        """Round to the grid of `x`."""
        if x.numel() == 0:
            return x
        with torch.no_grad():
            grid = self.grid_for(x)
            codes = torch.clamp(torch.round(x / grid.scale) + grid.zero_point, grid.qmin, grid.qmax)
            rounded = (codes - grid.zero_point) * grid.scale
        return with_gradient_of(rounded, x)


class Dsq(Quantizer):
    """u = clamp(x/s); φ = ⌊u⌋ + ½ + ½·k_s·tanh(k·(u − ⌊u⌋ − ½)); x̂ = round(φ)·s, ∂x̂/∂x = φ'(u).

    k_s = 1/(1 − α) and k = ln((k_s+1)/(k_s−1)) make φ continuous; for α → 0, φ becomes the hard staircase.
    """

    def __init__(self, *args: Any, alpha: float = 0.4, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not 0.0 < alpha < 1.0:
            raise BitwrightError(
                "alpha must be in (0, 1)", where=self.site, value=alpha, fix="0.4", code="invalid-options"
            )
        self.height = 1 / (1 - alpha)
        self.slope = log((self.height + 1) / (self.height - 1))

    def soft(self, steps: Tensor) -> Tensor:
        """φ: equals the identity at integers and is steep between them."""
        floor = torch.floor(steps).detach()
        return floor + 0.5 + 0.5 * self.height * torch.tanh(self.slope * (steps - floor - 0.5))

    def quantize(self, x: Tensor) -> Tensor:
        """Round the soft staircase."""
        scale, zero_point = self.layout.spread(self.scale, x), self.layout.spread(self.zero_point, x)
        soft = self.soft(torch.clamp(x / scale, self.qmin - zero_point, self.qmax - zero_point))
        return with_gradient_of(torch.round(soft), soft) * scale


def _choose_for_zeros(data: Quantizer, weight: Quantizer, largest: Tensor) -> None:
    """Choose the scale of an input or weight that contains only zeros, so that the bias isn't rounded to zero."""
    for factor, other in ((weight, data), (data, weight)):
        if factor.zeros is None or not bool(factor.zeros.any()):
            continue
        grid, by = factor.grid(), other.grid().scale.double()
        most = largest.double()
        if not grid.scale.dim():
            most, by = most.amax(), by.amax()
        product = grid.scale.double() * by
        coarse, small = (most > 0) & (product > most / _MIN_STEPS), product < SMALLEST
        scale = torch.where(coarse, most / _MIN_STEPS / by, torch.where(small, SMALLEST / by, grid.scale.double()))
        scale = torch.where(factor.zeros, scale, grid.scale.double()).clamp(max(SMALLEST, factor.finest), LARGEST)
        factor.set_grid(Grid(scale.float(), grid.zero_point, grid.qmin, grid.qmax))
    data.finest = max(data.finest, float((largest.double() / (weight.grid().scale.double() * _MAX_BIAS_CODE)).max()))


class Product(Quantizer):
    """Rounds to the product of two other quantizers' scales. `of` lists their sites."""

    def __init__(self, *args: Any, of: list[str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.of = of

    @property
    def ready(self) -> bool:
        """Whether both other quantizers are calibrated."""
        return all(part.ready for part in self.parts)

    def quantize(self, x: Tensor) -> Tensor:
        """Round in float64, because codes exceed the exact integers of float32."""
        scale = self.grid().scale.double()
        rounded = (torch.round(x.double() / scale) * scale).to(torch.float32)
        return rounded.detach() + (x - x.detach())  # straight-through gradient

    def grid(self) -> Grid:
        """The product of the scales."""
        data, weight = (part.grid().scale for part in self.parts)
        scale = (data * weight).to(torch.float32).clamp(SMALLEST, LARGEST)  # `export` rejects scales beyond this
        return Grid(scale, torch.zeros_like(scale), self.qmin, self.qmax)

    @torch.no_grad()
    def observe(self, x: Tensor) -> None:
        """Record the magnitude of the bias."""
        self.largest = x.detach().abs().to(torch.float32)

    @torch.no_grad()
    def update_grid(self) -> None:
        """Increase the weight scale of a channel if its bias doesn't fit. Such weights contribute little."""
        largest = self.__dict__.pop("largest", None)
        if largest is None:
            return
        data, weight = self.parts
        largest = largest if weight.grid().scale.dim() else largest.amax()
        _choose_for_zeros(data, weight, largest)
        grid, by = weight.grid(), data.grid().scale.double()
        needed = (largest.double() / (by * _MAX_BIAS_CODE)).clamp(max=LARGEST).float()
        raised = torch.maximum(grid.scale, needed)
        problem = product_problem(by, raised, where=self.site)
        if problem is not None:
            raise CalibrationError(
                problem.what, where=problem.where, value=problem.value, fix=problem.fix, code=problem.code
            )
        raised = torch.maximum(raised, (SMALLEST / by).float())  # for negligible channels
        if bool((raised > grid.scale).any()):
            weight.set_grid(Grid(raised, grid.zero_point, grid.qmin, grid.qmax))

    @torch.no_grad()
    def integers(self, x: Tensor) -> Tensor:
        """The codes, int32."""
        codes = torch.round(x.double() / self.grid().scale.double())
        return torch.clamp(codes, self.qmin, self.qmax).to(torch.int32)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save nothing, because the scale is derived."""
