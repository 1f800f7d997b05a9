"""Weights keep their size where a norm is folded into them, whatever a quantizer makes of them."""

from __future__ import annotations

import torch
from torch import Tensor

from bitwright.attach import Layout, Quantizer
from bitwright.attach.grid import size_of


class Sized(Quantizer):
    """A quantizer that gives weights another size: a norm behind the operator makes up for that.

    A folded norm can't. Its running σ is measured behind Q(w·γ/σ)/(γ/σ): were Q k times as large as its argument, so
    would σ be as it was a step before, without end, while what is deployed is k times as large as in training.
    """

    @property
    def keeps_size(self) -> bool:
        """Whether what comes is a weight times γ/σ."""
        return self.weight and self.fold is not None

    def as_large(self, squeezed: Tensor, x: Tensor) -> Tensor:
        """Each output channel as large as that of `x`, with all gradients."""
        assert self.fold is not None
        channels = Layout("channel", self.fold.axis)
        return squeezed * channels.over(ratio(x, squeezed, channels), x)


def ratio(x: Tensor, other: Tensor, layout: Layout) -> Tensor:
    """How much larger `x` is than the other, one number per row; 1 where the other is zero."""
    # norms of numbers near 1: squares of very small or large ones leave the range of float32
    units = [size_of(layout.rows(part.detach())) for part in (x, other)]
    large, own = (
        torch.linalg.vector_norm(layout.rows(part) / unit[:, None], dim=1)
        for part, unit in zip((x, other), units, strict=True)
    )
    alive = own > 0
    return torch.where(alive, large / torch.where(alive, own, 1.0) * (units[0] / units[1]), 1.0)
