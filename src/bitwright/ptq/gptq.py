"""GPTQ: round weights one input column at a time, and adjust the remaining columns to compensate the error.

H = Σ x·xᵀ over the operator's inputs, and U is the upper Cholesky factor of its inverse. After column i is rounded,
the later columns change by −(w_i − ŵ_i)/U_ii · U_i.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from bitwright.core.errors import CalibrationError
from bitwright.core.tensor_tree import eval_mode
from bitwright.graph.recording import Call
from bitwright.ptq.block_replay import Replay
from bitwright.ptq.step import PtqContext, Step, Weight, magnitude_unit
from bitwright.quantizers import in_mode

_KINDS = ("linear", "conv1d", "conv2d")


class Gptq(Step):
    """Round weights column by column with error compensation; one pass over the data."""

    name: ClassVar[str] = "gptq"

    damp: float = Field(default=0.01, gt=0, description="Value added to H's diagonal, relative to its mean.")
    columns: int = Field(default=128, ge=1, description="Columns to round before the remaining ones are updated.")
    batch: int = Field(default=32, ge=1, description="Samples per batch.")

    def units(self, context: PtqContext) -> Sequence[str]:
        """The quantized weights that GPTQ supports."""
        names = []
        for weight in context.weights():
            if weight.op.kind not in _KINDS or isinstance(_call(context, weight).argument(4, "padding", 0), str):
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
        replay: Replay = context.cache["replay"]
        weight = next(weight for weight in context.weights() if weight.op.name == unit)
        replay.advance(context.tape.position(unit))
        folded = context.folded(weight)
        groups = _groups(weight, folded)
        hessians = _hessians(context, replay, weight, groups)
        quantizer = weight.quantizer
        grid = quantizer.grid()
        shape = (groups, folded.shape[0] // groups, -1)
        scale, zero = (
            quantizer.layout.spread(part, folded).expand_as(folded).reshape(shape)
            for part in (grid.scale, grid.zero_point)
        )
        rows, codes = folded.reshape(shape), (grid.qmin, grid.qmax)
        done = [
            _round(rows[g], scale[g], zero[g], codes, _factor(hessians[g], self.damp, unit), self.columns)
            for g in range(groups)
        ]
        context.put(weight, torch.stack(done).reshape(folded.shape))

    def finish(self, context: PtqContext) -> None:
        """Remove the temporary files."""
        replay = context.cache.pop("replay", None)
        if replay is not None:
            replay.close()


def _call(context: PtqContext, weight: Weight) -> Call:
    return context.tape.calls[context.tape.position(weight.op.name)]


def _groups(weight: Weight, folded: Tensor) -> int:
    port = weight.op.port("input")
    assert port is not None
    return 1 if weight.op.kind == "linear" else int(port.shape[1]) // int(folded.shape[1])


def _hessians(context: PtqContext, replay: Replay, weight: Weight, groups: int) -> Tensor:
    """Σ x·xᵀ for each group of a convolution."""
    total: Tensor | None = None
    unit = 1.0  # a common factor doesn't change the result
    call = _call(context, weight)
    port = call.op.port("input")
    assert port is not None
    hooks = context.attachment.hooks_at(call.op)
    quantizer = None if hooks is None else hooks.inputs.get("input")
    with eval_mode(context.model), in_mode(context.model, "quantize"):
        for index in range(len(replay)):
            x = replay.values(index, "quantized")[port.sources[0]]
            x = (x if quantizer is None else quantizer(x)).float()
            if index == 0:
                unit = magnitude_unit(float(x.abs().max()))
            rows = _unfolded(x, call, weight, groups) / unit
            product = rows.transpose(1, 2) @ rows
            total = product if total is None else total + product
    assert total is not None
    return total


def _unfolded(x: Tensor, call: Call, weight: Weight, groups: int) -> Tensor:
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
    """The upper Cholesky factor of the inverse; columns of inputs that are always 0 are independent."""
    dead = hessian.diagonal() == 0
    hessian = hessian.clone()
    hessian.diagonal()[dead] = 1.0
    hessian.diagonal().add_(damp * float(hessian.diagonal().mean()))
    try:
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian.double()))
        upper: Tensor = torch.linalg.cholesky(inverse, upper=True)
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        raise CalibrationError(
            "the second-moment matrix of this operator's inputs isn't positive definite",
            where=where,
            value=f"damp={damp:g}",
            fix="increase damp (gptq:damp=0.1), use more calibration data, or omit gptq",
            code="gptq-not-positive-definite",
        ) from error
    return upper.float()


def _round(
    weight: Tensor,
    scale: Tensor,
    zero: Tensor,
    codes: tuple[int, int],
    upper: Tensor,
    width: int,
) -> Tensor:
    weight, result = weight.clone(), torch.empty_like(weight)
    for start in range(0, weight.shape[1], width):
        stop = min(start + width, weight.shape[1])
        errors = torch.zeros_like(weight[:, start:stop])
        for i in range(start, stop):
            low, high = codes[0] - zero[:, i], codes[1] - zero[:, i]
            rounded = torch.clamp(torch.round(weight[:, i] / scale[:, i]), low, high) * scale[:, i]
            error = (weight[:, i] - rounded) / upper[i, i]
            weight[:, i:stop] -= error[:, None] * upper[i, i:stop]
            errors[:, i - start] = error
            result[:, i] = rounded
        weight[:, stop:] -= errors @ upper[start:stop, stop:]
    return result
