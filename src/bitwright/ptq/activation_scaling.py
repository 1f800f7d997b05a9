"""SmoothQuant and AWQ: scale the channels of weights by their activations, so that rounding costs less.

SmoothQuant moves outliers into weights, which tolerate them better. Activations are divided by
s = max|x|^α / max|w|^(1−α), and weights are multiplied by it. AWQ scales up the weights that multiply large
activations: s = mean|x|^α. A small search chooses the α that changes the readers' outputs least.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from bitwright.ptq.channel_scaling import ScalingGroup, collect_statistics, find_groups, limit_scaling, weight_columns
from bitwright.ptq.step import PtqContext, Step, Weight, magnitude_unit, round_weight

_SMALLEST = 1e-5


class _Peak:
    def __init__(self) -> None:
        self.high: Tensor | None = None

    def see(self, rows: Tensor) -> None:
        high = rows.abs().amax(dim=0)
        self.high = high if self.high is None else torch.maximum(self.high, high)


class SmoothQuant(Step):
    """Balance the channels of activations that linear operators read (transformers); one pass over the data."""

    name: ClassVar[str] = "smoothquant"
    needs_ranges: ClassVar[bool] = False

    alpha: float = Field(
        default=0.5, ge=0, le=1, description="0 leaves activations unchanged, 1 equalizes all their channels."
    )
    batch: int = Field(default=32, ge=1, description="Samples per batch.")

    def units(self, context: PtqContext) -> Sequence[str]:
        """One unit: a single pass over the data covers all groups."""
        find_groups(context)
        return ["all norms"]

    def run(self, context: PtqContext, unit: str) -> None:
        """Collect the peaks of activations and move the factors."""
        groups = find_groups(context)
        peaks = {group.maker.name: _Peak() for group in groups}
        collect_statistics(context, groups, self.batch, peaks)
        for group in groups:
            high = peaks[group.maker.name].high
            if high is None:
                continue
            weights = weight_columns(context, group).abs().amax(dim=0)
            # a common factor of all channels has no effect
            size = magnitude_unit(float(high.max()))
            high = (high / size).clamp(min=_SMALLEST)
            weights = (weights / magnitude_unit(float(weights.max()))).clamp(min=_SMALLEST)
            by = (high**self.alpha / weights ** (1 - self.alpha)).clamp(min=_SMALLEST)
            group.divide(context, limit_scaling(by, size))


class _ActivationSample:
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

    def units(self, context: PtqContext) -> Sequence[str]:
        """One unit: a single pass over the data covers all groups."""
        find_groups(context)
        return ["all norms"]

    @torch.no_grad()
    def run(self, context: PtqContext, unit: str) -> None:
        """Collect activations, search the exponent of each group and move the factors."""
        groups = find_groups(context)
        weights = {weight.op.name: weight for weight in context.weights()}
        samples = {group.maker.name: _ActivationSample(self.rows) for group in groups}
        collect_statistics(context, groups, self.batch, samples)
        for group in groups:
            sample = samples[group.maker.name]
            if sample.total is not None:
                group.divide(context, self._best(context, group, sample, weights))

    def _best(
        self, context: PtqContext, group: ScalingGroup, sample: _ActivationSample, weights: dict[str, Weight]
    ) -> Tensor:
        assert sample.total is not None
        size = (sample.total / sample.count).float()
        unit = magnitude_unit(float(size.max()))
        size = (size / unit).clamp(min=_SMALLEST)
        x = torch.cat(sample.rows)
        x = x / magnitude_unit(float(x.abs().max()))
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
        return limit_scaling(best, unit)
