"""Cross-layer equalization: channels of two operators in a row get ranges alike, by factors that cancel.

With r₁ and r₂ the ranges of channel i in the first and in the second weight, s = √(r₁/r₂) makes both √(r₁·r₂): the
first is divided by s, the second multiplied. What lies between passes positive factors on (ReLU, pooling, zeros as
padding). A ReLU6 doesn't, where it clips: channels that reach the clip in the calibration data keep s = 1, and others
may grow only as far as they stay below it, with a margin. So the function is kept for all inputs that are no larger
than `margin` times what was seen, and the clip stays one number, which targets fuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from bitwright.attach import in_mode
from bitwright.graph.tape import Call, plainly, record
from bitwright.modes import evaluating
from bitwright.ptq.pairs import Pair, divide_outputs, find_pairs, input_ranges, multiply_inputs, output_ranges
from bitwright.ptq.step import Step
from bitwright.ptq.work import Work

_ENOUGH = 1.01  # a sweep that changes no factor by more than this is the last
_SMALLEST = 1e-12


class Equalize(Step):
    """Even out the ranges of channels between layers; needs no training and little data."""

    name: ClassVar[str] = "equalize"
    needs_ranges: ClassVar[bool] = False

    sweeps: int = Field(default=20, ge=1, description="At most so many times over all pairs; it mostly ends earlier.")
    largest: float = Field(default=1e4, gt=1, description="No factor beyond this, nor below its inverse.")
    margin: float = Field(default=1.25, ge=1, description="How much below a ReLU6's clip counts as below it.")
    batch: int = Field(default=32, ge=1, description="Samples at a time, where a ReLU6 must be watched.")

    def units(self, work: Work) -> Sequence[str]:
        """One: it takes seconds."""
        return ["all pairs"]

    def run(self, work: Work, unit: str) -> None:
        """Sweep until nothing moves."""
        pairs = find_pairs(work)
        peaks = _peaks(work, pairs, self.batch) if any(pair.clip for pair in pairs) else {}
        for _ in range(self.sweeps):
            moved = 1.0
            for pair in pairs:
                by = self._factors(work, pair, peaks.get(pair.first.name))
                divide_outputs(work, pair.first, by)
                multiply_inputs(work, pair.second, by)
                if pair.first.name in peaks:
                    peaks[pair.first.name] /= by
                moved = max(moved, float(by.max()), float(1 / by.min()))
            if moved < _ENOUGH:
                break

    def _factors(self, work: Work, pair: Pair, peak: Tensor | None) -> Tensor:
        first, second = output_ranges(work, pair.first), input_ranges(work, pair.second)
        by = torch.sqrt(first / second.clamp(min=_SMALLEST))
        by = torch.where((first < _SMALLEST) | (second < _SMALLEST), 1.0, by).clamp(1 / self.largest, self.largest)
        if peak is None or pair.ceiling == inf:
            return by
        clipped = peak * self.margin >= pair.ceiling
        if bool(clipped.any()):
            # those stay as they are, so what counts is how others compare with them
            by = by / by[clipped].log().mean().exp()
        by = torch.maximum(by, peak.clamp(min=0.0) * self.margin / pair.ceiling)
        return torch.where(clipped, 1.0, by).clamp(1 / self.largest, self.largest)


@torch.no_grad()
def _peaks(work: Work, pairs: list[Pair], batch: int) -> dict[str, Tensor]:
    """The highest value of each channel before its clip, by the operator that makes it."""
    wanted = {pair.clip.name: pair.first.name for pair in pairs if pair.clip is not None}
    found: dict[str, Tensor] = {}

    def look(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = wanted.get(call.op.name)
        if name is not None:
            high = (args[0] if args else kwargs["input"]).transpose(0, 1).flatten(1).amax(dim=1)
            found[name] = torch.maximum(found[name], high) if name in found else high
        return plainly(call, args, kwargs)

    with evaluating(work.model), in_mode(work.model, "float"):
        for piece in work.data.pieces(batch):
            tape, inputs = record(work.model, piece)
            tape.run(0, len(tape.calls), inputs, {**tape.constants, **work.live()}, look)
    return found
