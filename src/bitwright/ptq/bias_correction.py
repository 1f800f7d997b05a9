"""Bias correction: compensate the shift that rounding causes in the mean of an operator's outputs.

Operators are corrected in execution order. The correction of a channel is
δ = E[float output] − E[output of the quantized operator on quantized inputs].
It is added to the operator's bias, to the β of the norm folded into it, or to the running mean of the norm after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from bitwright.core.tensor_tree import eval_mode
from bitwright.graph import Op, Source
from bitwright.ptq.block_replay import Replay, by_channel
from bitwright.ptq.step import PtqContext, Step
from bitwright.quantizers import in_mode


class BiasCorrection(Step):
    """Correct the mean of each output channel; one pass over the data."""

    name: ClassVar[str] = "bias-correction"

    batch: int = Field(default=32, ge=1, description="Samples per batch.")

    def units(self, context: PtqContext) -> Sequence[str]:
        """The operators with a quantized weight and a tensor that can hold the correction."""
        names: list[str] = []
        for weight in context.weights():
            if _correction_tensor(context, weight.op) is None:
                context.skipped[weight.op.name] = "it has neither a bias nor a norm that could hold the correction"
            else:
                names.append(weight.op.name)
        return names

    @torch.no_grad()
    def run(self, context: PtqContext, unit: str) -> None:
        """Measure the mean of both outputs and apply the difference."""
        replay = context.cache.get("replay")
        if replay is None:
            replay = context.cache["replay"] = Replay(context, self.batch)
        op = context.graph.by_name[unit]
        norm = next((n for n, fold in context.plan.folds.items() if fold.into == unit), None)
        measured = unit if norm is None else norm  # the output of a folded norm is the operator's output
        start, stop = replay.tape.position(unit), replay.tape.position(measured) + 1
        replay.advance(start)
        total: Tensor | None = None
        count = 0
        source = Source("op", measured)
        with eval_mode(context.model), in_mode(context.model, "quantize"), _unquantized_outputs(context, op, norm):
            for index in range(len(replay)):
                exact = by_channel(replay.float(index, stop)[source].double(), op.kind)
                rounded = by_channel(replay.quantized(index, stop)[source].double(), op.kind)
                shift = (exact - rounded).sum(dim=1)
                total = shift if total is None else total + shift
                count += exact.shape[1]
        assert total is not None
        _correct(context, op, (total / count).float())

    def finish(self, context: PtqContext) -> None:
        """Remove the temporary files."""
        replay = context.cache.pop("replay", None)
        if replay is not None:
            replay.close()


class _unquantized_outputs:
    """Disable the quantizers after the operator, because clipping would hide a shift."""

    def __init__(self, context: PtqContext, op: Op, norm: str | None) -> None:
        ops = [op] if norm is None else [op, context.graph.by_name[norm]]
        hooks = [context.attachment.hooks_at(one) for one in ops]
        self.outputs = [(hook, hook.output) for hook in hooks if hook is not None and hook.output is not None]

    def __enter__(self) -> None:
        for hook, _ in self.outputs:
            hook.output = None

    def __exit__(self, *_: object) -> None:
        for hook, output in self.outputs:
            hook.output = output


def _correction_tensor(context: PtqContext, op: Op) -> Tensor | None:
    """The tensor that holds the correction."""
    fold = context.attachment.folds.get(op.site("bias"))
    if fold is not None:
        norm: Any = fold.norm
        found: Tensor = norm.running_mean if norm.bias is None else norm.bias
        return found
    bias = op.port("bias")
    if bias is not None:
        return context.weight_of(op, "bias") if context.readers[bias.sources[0]] == 1 else None
    norm = _norm_behind(context, op)
    if norm is None:
        return None
    mean: Tensor = norm.running_mean
    return mean


def _norm_behind(context: PtqContext, op: Op) -> Any:
    readers = context.graph.consumers.get(Source("op", op.name), ())
    if len(readers) != 1 or readers[0][0].kind != "batch_norm" or Source("op", op.name) in context.graph.output_sources:
        return None
    module = context.model.get_submodule(readers[0][0].module)
    return module if getattr(module, "running_mean", None) is not None else None


def _correct(context: PtqContext, op: Op, shift: Tensor) -> None:
    place: Any = _correction_tensor(context, op)
    fold = context.attachment.folds.get(op.site("bias"))
    if fold is not None and place is getattr(fold.norm, "running_mean", None):
        unit = fold.unit()  # the output contains −μ·γ/σ
        shift = torch.where(unit != 0, -shift / torch.where(unit != 0, unit, 1.0), 0.0)
    elif fold is None and op.port("bias") is None:
        shift = -shift
    place.add_(shift.to(place.dtype))
