"""Importance-weighted scales (llama.cpp's imatrix): choose scales by the rounding error, weighted by the inputs.

The expected squared error of an output is Σ E[x²]·(ŵ − w)² if inputs are uncorrelated. One pass over the data measures
E[x²] of each input, and each scale minimizes this sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from bitwright.graph.recording import Call, run_call
from bitwright.ptq.gptq import KINDS, input_groups, unfold_inputs
from bitwright.ptq.step import PtqContext, Step, Weight, magnitude_unit
from bitwright.quantizers.observers.histogram import best_range


class Imatrix(Step):
    """Search the scales of weights with the second moments of their inputs as importance; one pass over the data."""

    name: ClassVar[str] = "imatrix"
    needs_reference: ClassVar[bool] = False

    batch: int = Field(default=8, ge=1, description="Samples per batch.")

    def units(self, context: PtqContext) -> Sequence[str]:
        """One unit: a single pass over the data covers all weights."""
        searchable(context, KINDS)
        return ["all weights"]

    @torch.no_grad()
    def run(self, context: PtqContext, unit: str) -> None:
        """Measure all inputs, then search all scales."""
        weights = {weight.op.name: weight for weight in searchable(context, KINDS)}
        moments: dict[str, Tensor] = {}
        units: dict[str, float] = {}

        def look(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            weight = weights.get(call.op.name)
            if weight is not None:
                x = (args[0] if args else kwargs["input"]).float()
                rows = unfold_inputs(x, call, weight, input_groups(weight, weight.parameter))
                unit = units.setdefault(call.op.name, magnitude_unit(float(x.abs().max())))
                sums = (rows / unit).square().sum(dim=1)
                moments[call.op.name] = moments[call.op.name] + sums if call.op.name in moments else sums
            return run_call(call, args, kwargs)

        context.watch(self.batch, look)
        for name, weight in weights.items():
            if name in moments:
                search(context, weight, moments[name])


def searchable(context: PtqContext, kinds: Sequence[str] | None = None) -> list[Weight]:
    """The weights with scales that may be chosen freely; others are added to `skipped`."""
    found = []
    for weight in context.weights():
        if kinds is not None and weight.op.kind not in kinds:
            context.skipped[weight.op.name] = f"the inputs of {weight.op.kind} can't be matched with its weights"
        elif weight.quantizer.spec.guard is not None:
            context.skipped[weight.op.name] = "its guard determines the scale"
        elif weight.quantizer.spec.format.pot:
            context.skipped[weight.op.name] = "its scale is a power of two"
        elif weight.quantizer.spec.format.bits > 10:
            context.skipped[weight.op.name] = "rounding to this many bits loses nothing"
        else:
            found.append(weight)
    return found


def search(context: PtqContext, weight: Weight, moments: Tensor) -> None:
    """Set the weight's grid to the best one for inputs with these second moments: (groups, summed elements)."""
    folded, quantizer = context.folded(weight), weight.quantizer
    moments = moments / moments.mean().clamp(min=1e-30) + 1e-4  # inputs that are always 0 don't determine a scale
    spread = moments.repeat_interleave(folded.shape[0] // moments.shape[0], dim=0).reshape(folded.shape)
    rows = quantizer.layout.rows
    quantizer.set_range(*best_range(rows(folded), quantizer.format, rows(spread)), folded.shape)
