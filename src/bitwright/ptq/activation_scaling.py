"""SmoothQuant and AWQ: scale the channels of weights by their activations, so that rounding costs less.

SmoothQuant moves outliers into weights, which tolerate them better. Activations are divided by
s = max|x|^α / max|w|^(1−α), and weights are multiplied by it. AWQ scales up the weights that multiply large
activations: s = mean|x|^α. A small search chooses the α that changes the readers' outputs least.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor

from bitwright.ptq.channel_scaling import ScalingGroup, collect_statistics, find_groups, limit_scaling, weight_columns
from bitwright.ptq.step import PtqContext, Step, Weight, magnitude_unit, round_weight
from bitwright.quantizers import Quantizer, extremes

_SMALLEST = 1e-5


class _Peak:
    """The peak of each channel, and some rows to estimate rounding errors with."""

    def __init__(self, rows: int = 0) -> None:
        self.high: Tensor | None = None
        self.sample = _ActivationSample(rows)

    def see(self, rows: Tensor) -> None:
        high = rows.abs().amax(dim=0)
        self.high = high if self.high is None else torch.maximum(self.high, high)
        if self.sample.limit:
            self.sample.see(rows)


class SmoothQuant(Step):
    """Balance the channels of activations that linear operators read (transformers); one pass over the data."""

    name: ClassVar[str] = "smoothquant"
    needs_ranges: ClassVar[bool] = False

    alpha: float | Literal["auto"] = Field(
        default=0.5,
        description="0 leaves activations unchanged, 1 equalizes all their channels; auto: the value with the smallest "
        "expected error of the outputs for each group of operators, or no change.",
    )
    rows: int = Field(default=256, ge=1, description="With auto: number of activation rows (tokens) that are compared.")
    batch: int = Field(default=32, ge=1, description="Samples per batch.")

    @field_validator("alpha")
    @classmethod
    def _share(cls, alpha: float | str) -> float | str:
        if isinstance(alpha, float) and not 0 <= alpha <= 1:
            raise ValueError("alpha must be between 0 and 1, or auto")
        return alpha

    def units(self, context: PtqContext) -> Sequence[str]:
        """One unit: a single pass over the data covers all groups."""
        find_groups(context)
        return ["all norms"]

    @torch.no_grad()
    def run(self, context: PtqContext, unit: str) -> None:
        """Collect the peaks of activations and move the factors."""
        groups = find_groups(context)
        auto = self.alpha == "auto"
        peaks = {group.maker.name: _Peak(self.rows if auto else 0) for group in groups}
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
            if isinstance(self.alpha, float):
                best: Tensor | None = _balance(high, weights, self.alpha)
            else:
                expected = _ExpectedError(context, group, torch.cat(peaks[group.maker.name].sample.rows))
                tried = [None, *(_balance(high, weights, alpha) for alpha in _ALPHAS)]
                best = min(tried, key=expected)
            if best is not None:
                group.divide(context, limit_scaling(best, size))


_ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def _balance(high: Tensor, weights: Tensor, alpha: float) -> Tensor:
    by: Tensor = (high**alpha / weights ** (1 - alpha)).clamp(min=_SMALLEST)
    return by


class _ExpectedError:
    """The expected squared error of a group's outputs, if rounding errors are uniform and independent.

    An activation's error is step²/12 in each channel, which the squares of the weights multiply; a weight's error is
    step²/12, which the squares of the inputs multiply. No output is computed.
    """

    def __init__(self, context: PtqContext, group: ScalingGroup, rows: Tensor) -> None:
        self.rows = rows / magnitude_unit(float(rows.abs().max()))
        self.power = self.rows.square().mean(dim=0)
        self.weights: list[tuple[Tensor, Quantizer]] = []
        self.inputs: list[tuple[Tensor, Quantizer]] = []
        for reader in group.readers:
            weight, port = context.weight_of(reader), reader.port("input")
            assert weight is not None  # checked by `find_groups`
            assert port is not None
            whole = weight.detach().float()
            quantizer = _quantizer(context, reader.site("weight"))
            if quantizer is not None:
                self.weights.append((whole, quantizer))
            maker = context.graph.by_name[port.sources[0].name]  # the norm, or the last operator between a pair
            given = _quantizer(context, reader.site("input"), maker.site("output"))
            if given is not None:
                self.inputs.append((whole.square().sum(dim=0), given))

    def __call__(self, by: Tensor | None) -> float:
        by = torch.ones_like(self.power) if by is None else by
        by = by / (by.amax() * by.amin()).sqrt()
        total = 0.0
        x, power = self.rows / by, self.power / by.square()
        for norms, quantizer in self.inputs:
            steps = _steps(quantizer, x if quantizer.layout.granularity == "token" else x.reshape(1, -1))
            total += float(steps.square().mean() * (norms * by.square()).sum())
        for weight, quantizer in self.weights:
            steps = _steps(quantizer, quantizer.layout.rows(weight * by)).square()
            if quantizer.layout.granularity == "group":
                shares = power.reshape(-1, quantizer.layout.group).sum(dim=1)
                total += float((steps.reshape(-1, len(shares)) @ shares).sum())
            else:
                total += float(steps.mean() * len(weight) * power.sum())
        return total


def _quantizer(context: PtqContext, *sites: str) -> Quantizer | None:
    """The quantizer at the first of these sites that has one with integer codes."""
    attachment = context.attachment
    for site in sites:
        found = attachment.quantizers.get(attachment.shared.get(site, site))
        if found is not None and found.spec.format.minifloat is None:
            return found
    return None


def _steps(quantizer: Quantizer, rows: Tensor) -> Tensor:
    """The step of each row's grid."""
    low, high = extremes(rows)
    format = quantizer.spec.format
    span = 2 * torch.maximum(high, -low) if format.symmetric else high.clamp(min=0.0) - low.clamp(max=0.0)
    steps: Tensor = span / 2**format.bits
    return steps


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
