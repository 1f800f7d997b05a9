"""Half-quadratic quantization (HQQ): fit scales and zero points to Σ|ŵ − w|^p with p < 1, which ignores outliers.

The problem is split: an error term e contains the part of ŵ − w that the norm tolerates (a shrinkage with a closed
form), and scale and zero point are fitted to w − e by least squares. Both alternate, with an increasing penalty β
between them. It needs no data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from bitwright.core.formats import Format
from bitwright.ptq.imatrix import searchable
from bitwright.ptq.step import PtqContext, Step
from bitwright.quantizers import Grid

_CHUNK = 1 << 16  # elements at a time, so that temporaries stay in the cache


class Hqq(Step):
    """Fit the scales and zero points of weights to a norm that tolerates outliers; needs no data."""

    name: ClassVar[str] = "hqq"
    needs_reference: ClassVar[bool] = False

    p: float = Field(default=0.7, gt=0, lt=1, description="The exponent of the norm.")
    beta: float = Field(default=10.0, gt=0, description="The first β, for errors in units of the scale.")
    growth: float = Field(default=1.05, ge=1, description="The factor of β after each iteration.")
    iterations: int = Field(default=20, ge=1, description="Number of iterations.")

    def units(self, context: PtqContext) -> Sequence[str]:
        """The quantized weights."""
        return [weight.op.name for weight in searchable(context)]

    @torch.no_grad()
    def run(self, context: PtqContext, unit: str) -> None:
        """Fit the grid of one weight, from the calibrated one."""
        weight = next(weight for weight in searchable(context) if weight.op.name == unit)
        folded, quantizer = context.folded(weight), weight.quantizer
        grid, rows = quantizer.grid(), quantizer.layout.rows(folded)
        scale, zero = (
            quantizer.layout.rows(quantizer.layout.spread(part, folded).expand_as(folded))[:, 0].clone()
            for part in (grid.scale, grid.zero_point)
        )
        step = max(1, _CHUNK // rows.shape[1])
        for start in range(0, len(rows), step):
            part = slice(start, start + step)
            scale[part], zero[part] = self._fit(rows[part], scale[part], zero[part], grid, quantizer.format)
        fold = quantizer.layout.fold
        quantizer.set_grid(Grid(fold(scale, folded.shape), fold(zero, folded.shape), grid.qmin, grid.qmax))

    def _fit(self, rows: Tensor, scale: Tensor, zero: Tensor, grid: Grid, format: Format) -> tuple[Tensor, Tensor]:
        unit = scale[:, None]
        x = rows / unit  # errors in units of the first scale
        size = torch.ones_like(scale)
        best = torch.full_like(scale, float("inf"))
        found = (size, zero)
        beta = self.beta
        for _ in range(self.iterations + 1):
            codes = torch.clamp(torch.round(x / size[:, None]) + zero[:, None], grid.qmin, grid.qmax)
            steps = codes - zero[:, None]
            error = x - steps * size[:, None]
            magnitude = error.abs()
            norm = magnitude.pow(self.p).sum(dim=1)
            better = norm < best
            best = torch.where(better, norm, best)
            found = (torch.where(better, size, found[0]), torch.where(better, zero, found[1]))
            tolerated = (magnitude - magnitude.clamp(min=1e-8).pow(self.p - 1) / beta).clamp(min=0.0) * error.sign()
            wanted = x - tolerated
            if not format.symmetric:
                zero = torch.round((codes - wanted / size[:, None]).mean(dim=1)).clamp(grid.qmin, grid.qmax)
                steps = codes - zero[:, None]
            power = steps.square().sum(dim=1)
            fitted = (steps * wanted).sum(dim=1) / power.clamp(min=1.0)
            size = torch.where((power > 0) & (fitted > 0.1) & (fitted < 10.0), fitted, size)
            beta *= self.growth
        return found[0] * scale, found[1]
