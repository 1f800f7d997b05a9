"""A bias as integer kernels add it: int32 on the grid input scale × weight scale, without a range."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitwright.attach import Grid, Quantizer

_ROOM = 2.0**30  # accumulators are int32: the bias may take half of them


class Product(Quantizer):
    """Rounds to the product of two other quantizers' scales; `of` names their sites."""

    def __init__(self, *args: Any, of: list[str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.of = of

    @property
    def ready(self) -> bool:
        """As soon as both factors are."""
        return all(part.ready for part in self.parts)

    def quantize(self, x: Tensor) -> Tensor:
        """Round; in float64, as codes go beyond what float32 can count."""
        scale = self.grid().scale.double()
        rounded = (torch.round(x.double() / scale) * scale).to(torch.float32)
        return rounded.detach() + (x - x.detach())  # the gradient passes straight through

    def grid(self) -> Grid:
        """The product of the scales."""
        data, weight = (part.grid().scale for part in self.parts)
        scale = (data * weight).to(torch.float32)
        return Grid(scale, torch.zeros_like(scale), self.qmin, self.qmax)

    @torch.no_grad()
    def observe(self, x: Tensor) -> None:
        """Only the size of the bias matters."""
        self.largest = x.detach().abs().to(torch.float32)

    @torch.no_grad()
    def settle(self) -> None:
        """A bias that doesn't fit makes its channel's weight scale coarser: those weights hardly count."""
        largest = self.__dict__.pop("largest", None)
        if largest is None:
            return
        data, weight = self.parts
        grid = weight.grid()
        needed = largest / (data.grid().scale * _ROOM)
        raised = torch.maximum(grid.scale, needed if grid.scale.dim() else needed.amax())
        if bool((raised > grid.scale).any()):
            weight.set_grid(Grid(raised, grid.zero_point, grid.qmin, grid.qmax))

    @torch.no_grad()
    def integers(self, x: Tensor) -> Tensor:
        """The codes, int32."""
        codes = torch.round(x.double() / self.grid().scale.double())
        return torch.clamp(codes, self.qmin, self.qmax).to(torch.int32)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """No state of its own."""
