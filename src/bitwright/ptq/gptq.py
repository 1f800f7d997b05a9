"""GPTQ: round weights one input column at a time, and adjust the remaining columns to compensate the error.

H = Σ x·xᵀ over the operator's inputs, and U is the upper Cholesky factor of its inverse. After column i is rounded,
the later columns change by −(w_i − ŵ_i)/U_ii · U_i.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from bitwright.core.errors import CalibrationError
from bitwright.core.tensor_tree import eval_mode
from bitwright.graph.recording import Call
from bitwright.ptq.block_replay import Replay
from bitwright.ptq.step import PtqContext, Step, Weight, magnitude_unit
from bitwright.quantizers import Grid, Quantizer, grid_from_range, in_mode
from bitwright.quantizers.attachment import Alias
from bitwright.quantizers.observers.histogram import best_range

KINDS = ("linear", "conv1d", "conv2d")


class Gptq(Step):
    """Round weights column by column with error compensation; one pass over the data.

    Groups of columns get their scales when the first of their columns is reached, from the compensated weights.
    """

    name: ClassVar[str] = "gptq"
    needs_reference: ClassVar[bool] = False

    damp: float = Field(default=0.01, gt=0, description="Value added to H's diagonal, relative to its mean.")
    columns: int = Field(default=128, ge=1, description="Columns to round before the remaining ones are updated.")
    batch: int = Field(default=8, ge=1, description="Samples per batch.")
    scales: Literal["importance", "observer", "calibrated"] = Field(
        default="importance",
        description="Scales of groups: those of the compensated weights with the smallest error weighted by the "
        "inputs' second moments, the observer's of the compensated weights, or those of calibration and earlier steps.",
    )

    def units(self, context: PtqContext) -> Sequence[str]:
        """The quantized weights that GPTQ supports."""
        names = []
        for weight in context.weights():
            if weight.op.kind not in KINDS or isinstance(_call(context, weight).argument(4, "padding", 0), str):
                context.skipped[weight.op.name] = f"GPTQ can't unfold the inputs of this {weight.op.kind}"
            elif weight.quantizer.spec.guard is not None:
                context.skipped[weight.op.name] = "its guard requires rounding to nearest"
            else:
                names.append(weight.op.name)
        return names

    @torch.no_grad()
    def run(self, context: PtqContext, unit: str) -> None:
        """Compute H, round the columns and write the weight."""
        if "replay" not in context.cache:
            context.cache["replay"] = Replay(context, self.batch, targets=False)
            context.cache["weights"] = {weight.op.name: weight for weight in context.weights()}
            context.cache["rounded"] = []
        replay: Replay = context.cache["replay"]
        weight: Weight = context.cache["weights"][unit]
        replay.advance(context.tape.position(unit))
        folded = context.folded(weight)
        groups = input_groups(weight, folded)
        factors = self._factors(context, replay, weight, groups)
        matrices = folded.reshape(groups, folded.shape[0] // groups, -1)
        grid = _Grids(weight, folded, self.scales)
        width = -(-self.columns // grid.group) * grid.group if grid.group else self.columns  # whole groups
        done = [
            _round(matrices[g], partial(grid.at, g, factors[g][1]), factors[g][0], width, grid.codes)
            for g in range(groups)
        ]
        grid.settle()
        context.put(weight, torch.stack(done).reshape(folded.shape))
        # the weight is on its grid now: running it again needs no rounding
        weight.quantizer.stand_in = _as_is
        context.cache["rounded"].append(weight.quantizer)

    def _factors(self, context: PtqContext, replay: Replay, weight: Weight, groups: int) -> list[tuple[Tensor, Tensor]]:
        """The Cholesky factor and the diagonal of H for each group of a convolution.

        Linear operators that read the same tensor (queries, keys and values) share them.
        """
        port = weight.op.port("input")
        hooks = context.attachment.hooks_at(weight.op)
        quantizer = None if hooks is None else hooks.inputs.get("input")
        site = None if quantizer is None else quantizer.owner.site if isinstance(quantizer, Alias) else quantizer.site
        assert port is not None
        key = (port.sources[0], site) if weight.op.kind == "linear" else None
        known = context.cache.get("factors")
        if key is not None and known is not None and known[0] == key:
            shared: list[tuple[Tensor, Tensor]] = known[1]
            return shared
        context.cache["factors"] = None  # free the memory first
        hessians = _hessians(context, replay, weight, groups, quantizer)
        found = [(_factor(hessian, self.damp, weight.op.name), hessian.diagonal().clone()) for hessian in hessians]
        context.cache["factors"] = (key, found)
        return found

    def finish(self, context: PtqContext) -> None:
        """Remove the temporary files."""
        for quantizer in context.cache.pop("rounded", ()):
            quantizer.stand_in = None
        replay = context.cache.pop("replay", None)
        if replay is not None:
            replay.close()


def _as_is(x: Tensor) -> Tensor:
    return x


class _Grids:
    """The grid of a weight's columns: the calibrated one, or that of compensated groups, which replaces it."""

    def __init__(self, weight: Weight, folded: Tensor, scales: str) -> None:
        self.quantizer, self.by_importance = weight.quantizer, scales == "importance"
        self.grid = self.quantizer.grid()
        self.codes = (self.grid.qmin, self.grid.qmax)
        layout = self.quantizer.layout
        own = weight.op.kind == "linear" and layout.granularity == "group" and scales != "calibrated"
        self.group = layout.group if own else 0
        self.found: list[Grid] = []
        if not self.group:
            spread = self.quantizer.layout.spread
            full = [spread(part, folded).expand_as(folded) for part in (self.grid.scale, self.grid.zero_point)]
            rows = folded.shape[0] // input_groups(weight, folded)
            self.spread = [part.reshape(-1, rows, folded[0].numel()) for part in full]

    def at(self, number: int, importance: Tensor, column: int, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and zero point of a column. `weight` has the columns from this one on as rows."""
        if not self.group:
            scale, zero = self.spread
            return scale[number, :, column], zero[number, :, column]
        if column % self.group == 0:
            rows = weight[: self.group].T.contiguous()
            if self.by_importance:
                ends = best_range(rows, self.quantizer.spec.format, importance[column : column + self.group])
            else:
                observer = self.quantizer.new_observer()
                observer.observe(rows)
                ends = observer.range()
            self.found.append(grid_from_range(*ends, self.quantizer.spec.format, site=self.quantizer.site))
        return self.found[-1].scale, self.found[-1].zero_point

    def settle(self) -> None:
        """Use the grids of the groups."""
        if self.found:
            scale = torch.stack([grid.scale for grid in self.found], dim=1)
            zero_point = torch.stack([grid.zero_point for grid in self.found], dim=1)
            self.quantizer.set_grid(replace(self.grid, scale=scale, zero_point=zero_point))


def _call(context: PtqContext, weight: Weight) -> Call:
    return context.tape.calls[context.tape.position(weight.op.name)]


def input_groups(weight: Weight, folded: Tensor) -> int:
    """The groups of a convolution; 1 for linear operators."""
    port = weight.op.port("input")
    assert port is not None
    return 1 if weight.op.kind == "linear" else int(port.shape[1]) // int(folded.shape[1])


def _hessians(
    context: PtqContext, replay: Replay, weight: Weight, groups: int, quantizer: Quantizer | Alias | None
) -> Tensor:
    """Σ x·xᵀ for each group of a convolution."""
    total: Tensor | None = None
    unit = 1.0  # a common factor doesn't change the result
    call = _call(context, weight)
    port = call.op.port("input")
    assert port is not None
    with eval_mode(context.model), in_mode(context.model, "quantize"):
        for index in range(len(replay)):
            x = replay.values(index, "quantized")[port.sources[0]]
            x = (x if quantizer is None else quantizer(x)).float()
            if index == 0:
                unit = magnitude_unit(float(x.abs().max()))
            rows = unfold_inputs(x, call, weight, groups)
            rows = rows if unit == 1.0 else rows / unit
            if total is None:
                total = torch.zeros(groups, rows.shape[-1], rows.shape[-1], device=x.device)
            total.baddbmm_(rows.transpose(1, 2), rows)
    assert total is not None
    return total


def unfold_inputs(x: Tensor, call: Call, weight: Weight, groups: int) -> Tensor:
    """Reshape the inputs to (groups, positions, summed elements)."""
    if call.op.kind == "linear":
        return x.reshape(1, -1, x.shape[-1])
    stride, padding, dilation = (
        call.argument(index, name, default)
        for index, name, default in ((3, "stride", 1), (4, "padding", 0), (5, "dilation", 1))
    )
    size = tuple(weight.parameter.shape[2:])
    if call.op.kind == "conv1d":
        x, size = x.unsqueeze(2), (1, *size)
        stride, padding, dilation = ((1, _one(stride)), (0, _one(padding)), (1, _one(dilation)))
    columns = F.unfold(x, size, dilation=dilation, padding=padding, stride=stride)
    summed = int(weight.parameter[0].numel())
    return columns.reshape(x.shape[0], groups, summed, -1).permute(1, 0, 3, 2).reshape(groups, -1, summed)


def _one(value: int | Sequence[int]) -> int:
    return value if isinstance(value, int) else value[0]


def _factor(hessian: Tensor, damp: float, where: str) -> Tensor:
    """The upper Cholesky factor of the inverse; columns of inputs that are always 0 are independent.

    With the order of columns reversed, H = R·Rᵀ for an upper R, and the factor is the inverse of R: one decomposition
    and one triangular inverse. It is computed in float64 if float32 isn't sufficient.
    """
    reverse = hessian.flip(0, 1)
    dead = reverse.diagonal() == 0
    reverse.diagonal()[dead] = 1.0
    reverse.diagonal().add_(damp * float(reverse.diagonal().mean()))
    lower, failed = torch.linalg.cholesky_ex(reverse)
    if bool(failed):
        lower, failed = torch.linalg.cholesky_ex(reverse.double())
    if bool(failed):
        raise CalibrationError(
            "the second-moment matrix of this operator's inputs isn't positive definite",
            where=where,
            value=f"damp={damp:g}",
            fix="increase damp (gptq:damp=0.1), use more calibration data, or omit gptq",
            code="gptq-not-positive-definite",
        )
    inverse = torch.linalg.solve_triangular(lower, torch.eye(len(lower), dtype=lower.dtype), upper=False)
    upper: Tensor = inverse.flip(0, 1).float()
    return upper


_GridAt = Callable[[int, Tensor], tuple[Tensor, Tensor]]


def _round(weight: Tensor, grid_at: _GridAt, upper: Tensor, width: int, codes: tuple[int, int]) -> Tensor:
    """Round a matrix. It is transposed first, so that each column is contiguous."""
    columns = weight.T.contiguous()
    for start in range(0, len(columns), width):
        stop = min(start + width, len(columns))
        block = columns[start:stop]
        errors = torch.empty_like(block)
        for i in range(start, stop):
            row = block[i - start]
            scale, zero = grid_at(i, columns[i:])
            rounded = torch.div(row, scale).round_().add_(zero).clamp_(*codes).sub_(zero).mul_(scale)
            error = torch.sub(row, rounded, out=errors[i - start]).div_(upper[i, i])
            block[i - start :].addr_(upper[i, i:stop], error, alpha=-1.0)
            row.copy_(rounded)
        columns[stop:].addmm_(upper[start:stop, stop:].T, errors, alpha=-1.0)
    return columns.T
