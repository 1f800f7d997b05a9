"""AWQ: scale up the weights that multiply large activations, so that rounding changes them less.

The scale of a channel is s = mean|x|^α. A small search chooses the α that changes the readers' outputs least.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from bitwright.ptq.channel_scaling import Group, find_groups, gather, inward
from bitwright.ptq.step import Step, Weight, Work, unit_of
from bitwright.quantizers import Quantizer, grid_from_range

_SMALLEST = 1e-5


class _Sample:
    """The mean magnitude of each channel, and some rows to evaluate scaled weights on."""

    def __init__(self, rows: int) -> None:
        self.limit = rows
        self.rows: list[Tensor] = []
        self.total: Tensor | None = None
        self.count = 0

    def see(self, rows: Tensor) -> None:
        total = rows.abs().sum(dim=0, dtype=torch.float64)
        self.total = total if self.total is None else self.total + total
        self.count += rows.shape[0]
        kept = sum(part.shape[0] for part in self.rows)
        if kept < self.limit:
            # take rows from the whole batch, because neighbouring rows are similar
            stride = max(rows.shape[0] // max(self.limit // 4, 1), 1)
            self.rows.append(rows[::stride][: self.limit - kept].clone())


class Awq(Step):
    """Protect the weights with the largest effect on outputs; most useful for weight-only formats."""

    name: ClassVar[str] = "awq"
    needs_ranges: ClassVar[bool] = False

    grid: int = Field(default=20, ge=1, description="Number of exponents between 0 and 1 to try.")
    rows: int = Field(default=512, ge=1, description="Number of activation rows (tokens) used to compare exponents.")
    batch: int = Field(default=32, ge=1, description="Samples per batch.")

    def units(self, work: Work) -> Sequence[str]:
        """One unit: a single pass over the data covers all groups."""
        find_groups(work)
        return ["all norms"]

    @torch.no_grad()
    def run(self, work: Work, unit: str) -> None:
        """Collect activations, search the exponent of each group and move the factors."""
        groups = find_groups(work)
        weights = {weight.op.name: weight for weight in work.weights()}
        samples = {group.maker.name: _Sample(self.rows) for group in groups}
        gather(work, groups, self.batch, samples)
        for group in groups:
            sample = samples[group.maker.name]
            if sample.total is not None:
                group.divide(work, self._best(work, group, sample, weights))

    def _best(self, work: Work, group: Group, sample: _Sample, weights: dict[str, Weight]) -> Tensor:
        assert sample.total is not None
        size = (sample.total / sample.count).float()
        unit = unit_of(float(size.max()))
        size = (size / unit).clamp(min=_SMALLEST)
        x = torch.cat(sample.rows)
        x = x / unit_of(float(x.abs().max()))
        best, least = torch.ones_like(size), float("inf")
        for step in range(self.grid):
            by = size ** (step / self.grid)
            by = by / (by.amax() * by.amin()).sqrt()
            error = 0.0
            for reader in group.readers:
                if reader.name in weights:
                    weight = weights[reader.name].parameter.detach().float()
                    change = round_weight(weights[reader.name].quantizer, weight * by) / by - weight
                    error += float((x @ change.T).double().square().sum())
            if error < least:
                best, least = by, error
        return inward(best, unit)


def round_weight(quantizer: Quantizer, weight: Tensor) -> Tensor:
    """Return the weight as its quantizer would round it after calibration."""
    observer = quantizer.new_observer()
    observer.observe(quantizer.layout.rows(weight))
    grid = grid_from_range(*observer.range(), quantizer.spec.format, site=quantizer.site)
    scale, zero = (quantizer.layout.over(part, weight) for part in (grid.scale, grid.zero_point))
    return (torch.clamp(torch.round(weight / scale) + zero, grid.qmin, grid.qmax) - zero) * scale
