"""SignRound (AutoRound): learn roundings and scales with the sign of the gradient, block by block.

ŵ = s·a·clamp(round(w/(s·a) + v), n, p) with v in [−½, ½] and a scale factor a. Each step changes all v and a by the
learning rate, in the direction that lowers the error of the block's output. The rate decreases linearly to 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from bitwright.core.tensor_tree import eval_mode
from bitwright.ptq.block_replay import ReconstructionBlock, Replay, find_blocks
from bitwright.ptq.learned_rounding import frozen, replaced_quantizers
from bitwright.ptq.step import PtqContext, Step, Weight, magnitude_unit
from bitwright.quantizers import in_mode, with_gradient_of

_SMALLEST, _LARGEST = 0.5, 1.1  # limits of the factors of scales


class SignRound(Step):
    """Learn rounding and scales of weights by signed gradients; needs a few hundred forwards of each block."""

    name: ClassVar[str] = "signround"

    iterations: int = Field(default=200, ge=1, description="Optimizer steps for each block.")
    lr: float = Field(default=0.0, ge=0, description="The first learning rate; 0: 1/iterations.")
    scales: bool = Field(default=True, description="Whether to learn scales, too.")
    batch: int = Field(default=8, ge=1, description="Samples per optimizer step.")
    chain: int = Field(default=3, ge=1, description="Maximum number of weights per block in a chain without shortcuts.")

    def units(self, context: PtqContext) -> Sequence[str]:
        """The names of the blocks."""
        for weight in context.weights():
            if weight.quantizer.spec.guard is not None:
                context.skipped[weight.op.name] = "its guard requires rounding to nearest"
        return [block.name for block in find_blocks(context, self.chain) if _free(block)]

    def run(self, context: PtqContext, unit: str) -> None:
        """Fit one block. The result replaces rounding to nearest only if it has the smaller error on all data."""
        if "replay" not in context.cache:
            context.cache["replay"] = Replay(context, self.batch)
            context.cache["blocks"] = {block.name: block for block in find_blocks(context, self.chain)}
        replay: Replay = context.cache["replay"]
        block: ReconstructionBlock = context.cache["blocks"][unit]
        replay.advance(block.start)
        parts = [_SignedRounding(context, weight, scales=self.scales) for weight in _free(block)]
        with eval_mode(context.model), in_mode(context.model, "quantize"), frozen(context.model):
            with torch.no_grad():
                for index in range(len(replay)):
                    replay.keep(index, "target", {block.output: replay.float(index, block.stop)[block.output]})
                before = sum(float(_error(replay, block, index)) for index in range(len(replay)))
            with replaced_quantizers(parts):
                self._fit(context, replay, block, parts)
                with torch.no_grad():
                    after = sum(float(_error(replay, block, index)) for index in range(len(replay)))
        if after < before:
            for part in parts:
                part.settle(context)
        replay.forget("target")

    def _fit(
        self, context: PtqContext, replay: Replay, block: ReconstructionBlock, parts: list[_SignedRounding]
    ) -> None:
        learned = [parameter for part in parts for parameter in part.learned]
        rate = self.lr or 1.0 / self.iterations
        for step in range(self.iterations):
            index = int(torch.randint(len(replay), (), generator=context.generator))
            gradients = torch.autograd.grad(_error(replay, block, index), learned, allow_unused=True)
            with torch.no_grad():
                for parameter, gradient in zip(learned, gradients, strict=True):
                    if gradient is not None:
                        parameter.sub_(gradient.sign() * (rate * (1 - step / self.iterations)))
                for part in parts:
                    part.limit()

    def finish(self, context: PtqContext) -> None:
        """Remove the temporary files."""
        replay = context.cache.pop("replay", None)
        if replay is not None:
            replay.close()


def _free(block: ReconstructionBlock) -> list[Weight]:
    return [weight for weight in block.weights if weight.quantizer.spec.guard is None]


def _error(replay: Replay, block: ReconstructionBlock, index: int) -> Tensor:
    target = replay.values(index, "target")[block.output].float()
    out = replay.quantized(index, block.stop)[block.output].float()
    return ((out - target) / magnitude_unit(float(target.abs().max()))).square().mean()


class _SignedRounding:
    """A weight with learned rounding; it replaces the weight's quantizer during the fit."""

    def __init__(self, context: PtqContext, weight: Weight, *, scales: bool) -> None:
        self.weight, self.quantizer = weight, weight.quantizer
        self.folded, self.grid = context.folded(weight), weight.quantizer.grid()
        self.offset = nn.Parameter(torch.zeros_like(self.folded))
        self.size = nn.Parameter(torch.ones_like(self.grid.scale))
        pot = self.quantizer.spec.format.pot
        self.learned = [self.offset, self.size] if scales and not pot else [self.offset]

    def __call__(self, x: Tensor) -> Tensor:
        """The rounded weight."""
        spread = self.quantizer.layout.spread
        scale = spread(self.grid.scale * self.size, self.folded)
        zero = spread(self.grid.zero_point, self.folded)
        steps = self.folded / scale + self.offset
        codes = torch.clamp(with_gradient_of(torch.round(steps), steps), self.grid.qmin - zero, self.grid.qmax - zero)
        return codes * scale

    def limit(self) -> None:
        """Keep offsets within half a step, and factors near 1."""
        self.offset.clamp_(-0.5, 0.5)
        self.size.clamp_(_SMALLEST, _LARGEST)

    @torch.no_grad()
    def settle(self, context: PtqContext) -> None:
        """Write the rounded weight, and its scales into the quantizer."""
        context.put(self.weight, self(self.folded))
        self.quantizer.set_grid(replace(self.grid, scale=self.grid.scale * self.size))
