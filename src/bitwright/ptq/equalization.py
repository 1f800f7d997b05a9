"""Cross-layer equalization: balance the channel ranges of two consecutive operators with factors that cancel.

Let r₁ and r₂ be the ranges of channel i in the first and the second weight. Dividing the first weight by s = √(r₁/r₂)
and multiplying the second by s makes both ranges √(r₁·r₂). The operators between them must preserve positive factors
(ReLU, pooling, zero padding).

Balancing weights alone can hurt activations: a channel that becomes small relative to others is rounded to zero. s is
therefore limited to [l, 1], where l lets the channel's peak grow to the peak of the largest channel, so no activation
becomes coarser. A common factor of all channels has no cost. The step chooses the one with the least noise in the
second operator's output, estimated from ranges and activations. If none improves the noise, s = 1.

A ReLU6 preserves factors only below its clip. Channels that reach the clip in the calibration data, with a margin, keep
s = 1; the others grow only as far as they stay below it. The function is therefore unchanged for all inputs up to
`margin` times the observed ones, and the clip remains a single number, which targets can fuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from bitwright.graph.recording import Call, run_call
from bitwright.ptq.block_replay import by_channel
from bitwright.ptq.channel_scaling import (
    ScalingPair,
    divide_outputs,
    find_pairs,
    input_norms,
    input_ranges,
    multiply_inputs,
    numbers_per_input,
    output_ranges,
)
from bitwright.ptq.step import PtqContext, Step, magnitude_unit
from bitwright.quantizers.grid import SMALLEST

_ENOUGH = 1.01  # stop after a sweep that changes no factor by more than this
_SMALLEST = 1e-12
_TRIED = 64


class Equalize(Step):
    """Balance the channel ranges of consecutive layers; needs no training and little data."""

    name: ClassVar[str] = "equalize"
    needs_ranges: ClassVar[bool] = False

    sweeps: int = Field(
        default=20, ge=1, description="Maximum number of sweeps over all pairs; it usually ends earlier."
    )
    largest: float = Field(default=1e4, gt=1, description="Maximum growth of a channel.")
    margin: float = Field(default=1.25, ge=1, description="Safety factor between a channel's peak and a ReLU6's clip.")
    batch: int = Field(default=32, ge=1, description="Samples per batch.")

    def units(self, context: PtqContext) -> Sequence[str]:
        """One unit, which takes seconds."""
        return ["all pairs"]

    def run(self, context: PtqContext, unit: str) -> None:
        """Sweep over all pairs until the factors converge."""
        pairs = find_pairs(context)
        seen = _collect_statistics(context, pairs, self.batch)
        for _ in range(self.sweeps):
            moved = 1.0
            for pair in pairs:
                by = self._factors(context, pair, seen[pair.first.name])
                divide_outputs(context, pair.first, by)
                multiply_inputs(context, pair.second, by)
                seen[pair.first.name].divide(by)
                moved = max(moved, float(1 / by.min()))
            if moved < _ENOUGH:
                break

    def _factors(self, context: PtqContext, pair: ScalingPair, seen: _PairStatistics) -> Tensor:
        first, second = output_ranges(context, pair.first), input_ranges(context, pair.second)
        dead = (first < _least(first)) | (second < _least(second))
        peak = seen.peak
        ceiling, margin = (pair.ceiling, self.margin) if pair.clip else (float(peak.max().clamp(min=SMALLEST)), 1.0)
        least = (peak * margin / ceiling).clamp(1 / self.largest, 1.0)
        ideal = torch.where(dead, 1.0, torch.sqrt(first / second.clamp(min=_least(second))))
        common = torch.logspace(float(ideal.min().log2()) - 1, float(ideal.max().log2()) + 1, _TRIED, base=2.0)
        tried = torch.maximum((ideal / common[:, None].to(ideal)).clamp(max=1.0), least)
        tried = torch.cat([torch.ones_like(tried[:1]), torch.where(dead, 1.0, tried)])
        noise = self._noise(context, pair, seen, first / tried, second * tried, tried)
        return tried[int(noise.argmin())]

    def _noise(
        self, context: PtqContext, pair: ScalingPair, seen: _PairStatistics, first: Tensor, second: Tensor, by: Tensor
    ) -> Tensor:
        """The noise in the second output from rounding both weights, per row of factors, up to a constant."""
        # float64, because squares of large numbers exceed float32
        first, second, by = first.double(), second.double(), by.double()
        total = torch.zeros_like(by[:, 0])
        quantizers = [context.attachment.quantizers.get(op.site("weight")) for op in (pair.first, pair.second)]
        norms = input_norms(context, pair.second)
        if quantizers[0] is not None:
            steps = first.square()
            if quantizers[0].layout.granularity == "tensor":
                steps = steps.amax(dim=1, keepdim=True)
            levels = 4.0 ** quantizers[0].format.bits
            total = total + seen.inflow / levels * (steps * norms * by.square()).sum(dim=1)
        if quantizers[1] is not None:
            levels = 4.0 ** quantizers[1].format.bits
            taps = numbers_per_input(context, pair.second)
            total = total + taps / levels * second.square().amax(dim=1) * (seen.energy / by.square()).sum(dim=1)
        return total


def _least(ranges: Tensor) -> float:
    """Channels with a smaller range count as dead."""
    return _SMALLEST * min(1.0, magnitude_unit(float(ranges.max())))


class _PairStatistics:
    """Statistics of the activations between the two operators of a pair."""

    def __init__(self) -> None:
        self.peak = torch.zeros(())  # of each channel, before its clip
        self.energy = torch.zeros(())  # mean square of each channel of the second operator's input
        self.inflow = 0.0  # mean square of the first operator's input, times the number of summed elements
        self.batches = 0

    def divide(self, by: Tensor) -> None:
        self.peak = self.peak / by
        self.energy = self.energy / by.square()


@torch.no_grad()
def _collect_statistics(context: PtqContext, pairs: list[ScalingPair], batch: int) -> dict[str, _PairStatistics]:
    """Collect the statistics of all pairs in one pass over the data."""
    found = {pair.first.name: _PairStatistics() for pair in pairs}
    firsts = {pair.first.name: pair for pair in pairs}
    seconds = {pair.second.name: pair for pair in pairs}
    clips = {pair.clip.name: pair for pair in pairs if pair.clip is not None}

    def look(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x: Any = args[0] if args else kwargs.get("input")
        name = call.op.name
        if name in firsts:
            weight = context.weight_of(firsts[name].first)
            assert weight is not None
            found[name].inflow += float(x.double().square().mean()) * weight[0].numel()
        if name in seconds:
            pair = seconds[name]
            seen, channels = found[pair.first.name], by_channel(x.float(), pair.first.kind)
            seen.energy = seen.energy + channels.double().square().mean(dim=1)
            seen.batches += 1
            if pair.clip is None:
                seen.peak = torch.maximum(seen.peak, channels.abs().amax(dim=1))
        if name in clips:
            seen = found[clips[name].first.name]
            seen.peak = torch.maximum(seen.peak, by_channel(x.float(), clips[name].first.kind).amax(dim=1))
        return run_call(call, args, kwargs)

    context.watch(batch, look)
    for seen in found.values():
        seen.energy, seen.inflow = seen.energy / max(seen.batches, 1), seen.inflow / max(seen.batches, 1)
    return found
