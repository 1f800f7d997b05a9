"""The bias of integer kernels: int32 with the product of the input and weight scales."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitwright.core.errors import CalibrationError
from bitwright.quantizers.base import Quantizer
from bitwright.quantizers.grid import LARGEST, SMALLEST, Grid, product_problem

_MIN_STEPS = 2.0**10  # the minimum number of steps for the bias
_MAX_BIAS_CODE = 2.0**30  # accumulators are int32: the bias may use half of the range


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
