"""Reconstruction: learn to round weights up or down so that a block's output approaches the float model's.

ŵ = s·clamp(⌊w/s⌋ + h(V), n, p) with h = clip(1.2·σ(V) − 0.1, 0, 1). h starts at the fraction of w and ends at 0 or 1,
because of the penalty λ·Σ(1 − |2h − 1|^β) with decreasing β. The result is written into the weight itself, which then
lies on its grid. The plain quantizer, checkpoints and artefacts therefore all have the same codes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import cos, pi
from typing import Any, ClassVar, Literal, Protocol

import torch
from pydantic import Field
from torch import Tensor, nn

from bitwright.core.tensor_tree import eval_mode
from bitwright.graph.recording import Values
from bitwright.ptq.block_replay import ReconstructionBlock, Replay, find_blocks, find_layers
from bitwright.ptq.step import PtqContext, Step, Weight, is_uniform, magnitude_unit
from bitwright.quantizers import Grid, Quantizer, in_mode, round_to_grid, usable_scale, with_gradient_of

_LOW, _HIGH = -0.1, 1.1  # the range exceeds [0, 1], so that the sigmoid can reach 0 and 1
_TINY = 1e-30
_GUARD_MARGIN = 127 / 126  # guards assume rounding to nearest; rounding up can add another half code


class Reconstruct(Step):
    """Base class of AdaRound, BRECQ and QDrop."""

    iterations: int = Field(default=1000, ge=1, description="Optimizer steps for each layer or block.")
    batch: int = Field(default=32, ge=1, description="Samples per optimizer step.")
    lr: float = Field(default=0.01, gt=0, description="Adam's learning rate for the rounding.")
    weight: float = Field(default=0.01, gt=0, description="λ: weight of the penalty that drives h to 0 or 1.")
    warmup: float = Field(default=0.2, ge=0, lt=1, description="Share of the iterations without this penalty.")
    start: float = Field(default=20.0, gt=0, le=1000, description="β at the end of the warm-up.")
    end: float = Field(default=2.0, gt=0, le=1000, description="β at the last iteration.")
    decay: Literal["cosine", "linear"] = Field(default="cosine", description="How β changes from start to end.")
    activation_lr: float = Field(default=0.0, ge=0, description="Adam's learning rate for activation scales; 0: fixed.")
    activation_scale: Literal["log", "linear"] = Field(
        default="log", description="What Adam changes: the logarithm of an activation scale, or the scale itself."
    )

    @property
    def learns_ranges(self) -> bool:
        """Whether to fit activation scales too. Otherwise only the operator's input is quantized during the fit."""
        return self.activation_lr > 0

    @abstractmethod
    def blocks(self, context: PtqContext) -> list[ReconstructionBlock]:
        """The blocks to reconstruct."""

    def given(self, replay: Replay, index: int, generator: torch.Generator) -> Values:
        """The inputs of the block."""
        return replay.values(index, "quantized")

    def quantize(self, x: Tensor, rounded: Tensor, generator: torch.Generator) -> Tensor:
        """The value of an activation during the fit."""
        return rounded

    def units(self, context: PtqContext) -> Sequence[str]:
        """The names of the blocks."""
        return [block.name for block in self.blocks(context)]

    def run(self, context: PtqContext, unit: str) -> None:
        """Fit one block and write the rounded weights."""
        kept = context.cache
        if "replay" not in kept:
            kept["blocks"] = {block.name: block for block in self.blocks(context)}
            kept["ranges"] = _first_passed(context, kept["blocks"].values()) if self.learns_ranges else {}
            kept["replay"] = Replay(context, self.batch)
            if self.uses_fisher:
                with eval_mode(context.model), frozen(context.model):
                    kept["fisher"] = fisher(context, kept["replay"], list(kept["blocks"].values()))
        block: ReconstructionBlock = kept["blocks"][unit]
        replay: Replay = kept["replay"]
        replay.advance(block.start)
        softs = [_LearnedRounding(context, weight) for weight in block.weights]
        ranges = [_LearnedScale(self, context, quantizer) for quantizer in kept["ranges"].get(unit, [])]
        with eval_mode(context.model), in_mode(context.model, "quantize"), frozen(context.model):
            with torch.no_grad():
                for index in range(len(replay)):
                    replay.keep(index, "target", {block.output: replay.float(index, block.stop)[block.output]})
            with replaced_quantizers([*softs, *ranges]), outputs_off(context, block, off=not self.learns_ranges):
                self._fit(context, replay, block, softs, ranges)
        for soft in softs:
            soft.harden(context)
        for fitted in ranges:
            fitted.settle()
        replay.forget("target")

    def _fit(
        self,
        context: PtqContext,
        replay: Replay,
        block: ReconstructionBlock,
        softs: list[_LearnedRounding],
        ranges: list[_LearnedScale],
    ) -> None:
        rounding = torch.optim.Adam([soft.v for soft in softs], lr=self.lr)
        scales = torch.optim.Adam([r.learned for r in ranges], lr=self.activation_lr) if ranges else None
        begin = int(self.warmup * self.iterations)
        peaks = [replay.values(index, "target")[block.output].abs().max() for index in range(len(replay))]
        unit = magnitude_unit(float(torch.stack(peaks).max()))
        for step in range(self.iterations):
            index = int(torch.randint(len(replay), (), generator=context.generator))
            values = self.given(replay, index, context.generator)
            out = replay.quantized(index, block.stop, values)[block.output]
            error = ((out - replay.values(index, "target")[block.output]) / unit).square()
            if self.uses_fisher:
                error = error * context.cache["fisher"][block.name, error.shape[1:]]
            loss = error.sum(dim=1).mean() if error.dim() > 1 else error.mean()
            if step >= begin:
                beta = self.exponent((step - begin) / max(self.iterations - begin, 1))
                loss = loss + self.weight * torch.stack([soft.penalty(beta) for soft in softs]).sum()
            rounding.zero_grad()
            if scales is not None:
                scales.zero_grad()
                for group in scales.param_groups:
                    group["lr"] = self.activation_lr * 0.5 * (1 + cos(pi * step / self.iterations))
            loss.backward()
            rounding.step()
            if scales is not None:
                scales.step()

    def exponent(self, share: float) -> float:
        """β after this share of the iterations that follow the warm-up.

        >>> from bitwright.ptq.learned_rounding import AdaRound
        >>> [round(AdaRound(decay=decay).exponent(0.25), 2) for decay in ("linear", "cosine")]
        [15.5, 17.36]
        """
        left = 1 - share if self.decay == "linear" else 0.5 * (1 + cos(pi * share))
        return self.end + (self.start - self.end) * left

    @property
    def uses_fisher(self) -> bool:
        """Whether errors are weighted by Fisher information."""
        return False

    def finish(self, context: PtqContext) -> None:
        """Remove the temporary files."""
        replay = context.cache.pop("replay", None)
        if replay is not None:
            replay.close()


class StandIn(Protocol):
    """Replaces a quantizer during a fit."""

    quantizer: Quantizer

    def __call__(self, x: Tensor) -> Tensor:
        """Round `x`."""


class _LearnedRounding:
    """A weight with learned rounding; it replaces the weight's quantizer during the fit."""

    def __init__(self, context: PtqContext, weight: Weight) -> None:
        self.weight, self.quantizer = weight, weight.quantizer
        folded = context.folded(weight)
        grid = self.quantizer.grid()
        if self.quantizer.spec.guard is not None:
            grid = Grid(grid.scale * _GUARD_MARGIN, grid.zero_point, grid.qmin, grid.qmax)
            self.quantizer.set_grid(grid)
        spread = self.quantizer.layout.spread
        self.scale, zero = spread(grid.scale, folded), spread(grid.zero_point, folded)
        self.low, self.high = grid.qmin - zero, grid.qmax - zero
        steps = folded / self.scale
        self.floor = torch.floor(steps)
        fraction = ((steps - self.floor) - _LOW) / (_HIGH - _LOW)
        self.v = nn.Parameter(torch.logit(fraction))
        # if the norm multiplies a channel by 0, rounding up has no effect
        factor = context.fold_factor(weight)
        self.alive = None if factor is None else (factor != 0).expand_as(folded)

    def up(self) -> Tensor:
        """The position of each weight between down (0) and up (1)."""
        up = torch.clamp(torch.sigmoid(self.v) * (_HIGH - _LOW) + _LOW, 0.0, 1.0)
        return up if self.alive is None else up * self.alive

    def __call__(self, x: Tensor) -> Tensor:
        """The softly rounded weight."""
        return torch.clamp(self.floor + self.up(), self.low, self.high) * self.scale

    def penalty(self, beta: float) -> Tensor:
        """0 if all weights are fully up or down."""
        return (1 - (2 * self.up() - 1).abs().pow(beta)).sum()

    @torch.no_grad()
    def harden(self, context: PtqContext) -> None:
        """Round up or down and write the result into the weight."""
        codes = torch.clamp(self.floor + (self.up() >= 0.5), self.low, self.high)
        context.put(self.weight, codes * self.scale)


class _LearnedScale:
    """An activation quantizer with a learned scale."""

    def __init__(self, step: Reconstruct, context: PtqContext, quantizer: Quantizer) -> None:
        self.step, self.quantizer, self.generator = step, quantizer, context.generator
        self.grid = quantizer.grid()
        self.linear = step.activation_scale == "linear"
        self.learned = nn.Parameter(self.grid.scale.clone() if self.linear else torch.zeros_like(self.grid.scale))

    def scale(self) -> Tensor:
        """The current scale: positive, and a power of two where the format requires it."""
        scale = self.learned if self.linear else self.grid.scale * self.learned.exp()
        if self.quantizer.spec.format.pot or self.linear:
            scale = with_gradient_of(usable_scale(scale, pot=self.quantizer.spec.format.pot), scale)
        return scale

    def __call__(self, x: Tensor) -> Tensor:
        """Round to the grid of the current scale."""
        rounded = round_to_grid(x, replace(self.grid, scale=self.scale()), self.quantizer.layout)
        return self.step.quantize(x, rounded, self.generator)

    @torch.no_grad()
    def settle(self) -> None:
        """Write the learned scale into the quantizer."""
        self.quantizer.set_grid(replace(self.grid, scale=self.scale()))


def _activations(context: PtqContext, block: ReconstructionBlock) -> Iterator[Quantizer]:
    """The activation quantizers in a block."""
    for call in context.tape.calls[block.start : block.stop]:
        hooks = context.attachment.hooks_at(call.op)
        if hooks is None:
            continue
        for port, found in [*hooks.inputs.items(), ("output", hooks.output)]:
            if found is not None and port not in ("weight", "bias"):
                quantizer = found if isinstance(found, Quantizer) else found.owner
                if not quantizer.weight:
                    yield quantizer


def _first_passed(context: PtqContext, blocks: Any) -> dict[str, list[Quantizer]]:
    """Assign each activation quantizer to the first block that uses it."""
    taken: set[str] = set()
    result: dict[str, list[Quantizer]] = {}
    for block in blocks:
        mine = {q.site: q for q in _activations(context, block) if q.site not in taken and is_uniform(q)}
        taken |= set(mine)
        result[block.name] = list(mine.values())
    return result


@contextmanager
def outputs_off(context: PtqContext, block: ReconstructionBlock, *, off: bool) -> Iterator[None]:
    """Disable output quantizers: a layer's weight is fitted to its own error."""
    hooks = [context.attachment.hooks_at(call.op) for call in context.tape.calls[block.start : block.stop] if off]
    outputs = [(hook, hook.output) for hook in hooks if hook is not None]
    for hook, _ in outputs:
        hook.output = None
    try:
        yield
    finally:
        for hook, output in outputs:
            hook.output = output


@contextmanager
def replaced_quantizers(parts: Sequence[StandIn]) -> Iterator[None]:
    """Use the stand-ins instead of their quantizers."""
    for part in parts:
        part.quantizer.stand_in = part
    try:
        yield
    finally:
        for part in parts:
            part.quantizer.stand_in = None


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Disable gradients of the model's parameters."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def fisher(
    context: PtqContext, replay: Replay, blocks: list[ReconstructionBlock]
) -> dict[tuple[str, torch.Size], Tensor]:
    """The importance of each element of each block's output, by block and sample shape; one pass of the float model.

    For classifiers it is the diagonal of the Fisher information: the squared gradient of the log-likelihood of labels
    drawn from the model's own prediction. It is averaged over all samples, because a few uncertain samples have nearly
    all of the gradient and would dominate the fit. For other models it is the squared gradient of a random projection
    of the output. Half of the weight is spread evenly.
    """
    generator = torch.Generator().manual_seed(
        context.seed
    )  # not the unit's seed: a resumed run gets here in another unit
    sums: dict[tuple[str, torch.Size], Tensor] = {}
    units: dict[tuple[str, torch.Size], float] = {}
    for index in range(len(replay)):
        values, start = replay.values(index, "float"), 0
        points: list[Tensor] = []
        for block in blocks:
            values = replay.float(index, block.stop, values, start=start)
            start = block.stop
            if not values[block.output].requires_grad:
                values[block.output] = values[block.output].detach().requires_grad_()
            points.append(values[block.output])
        result = replay.float(index, len(replay.tape.calls), values, start=start)
        loss = _probe_loss(result[replay.tape.outputs[0]], generator)
        for block, gradient in zip(blocks, torch.autograd.grad(loss, points), strict=True):
            key = (block.name, gradient.shape[1:])
            unit = units.setdefault(key, magnitude_unit(float(gradient.abs().max())))
            squared = (gradient / unit).square().sum(dim=0)
            sums[key] = sums[key] + squared if key in sums else squared
    return {key: 0.5 + 0.5 * total / total.mean().clamp(min=_TINY) for key, total in sums.items()}


def _probe_loss(output: Tensor, generator: torch.Generator) -> Tensor:
    if output.dim() == 2 and output.shape[1] > 1:
        logs = torch.log_softmax(output.float(), dim=1)
        labels = torch.multinomial(logs.detach().exp().cpu(), 1, generator=generator).to(output.device)
        return -logs.gather(1, labels).sum()
    signs = torch.randint(0, 2, output.shape, generator=generator).to(output.device) * 2 - 1
    return (output * signs).sum()


class AdaRound(Reconstruct):
    """Minimizes the error of each layer's output, on quantized inputs, relative to the float model."""

    name: ClassVar[str] = "adaround"

    def blocks(self, context: PtqContext) -> list[ReconstructionBlock]:
        """Each layer is one block."""
        return find_layers(context)


class Brecq(Reconstruct):
    """Learn rounding of weights and scales of activations, block by block, weighted by Fisher information."""

    name: ClassVar[str] = "brecq"
    chain: int = Field(default=3, ge=1, description="Maximum number of weights per block in a chain without shortcuts.")
    fisher: bool = Field(default=True, description="Weight errors by the squared gradient of the loss.")
    activation_lr: float = Field(
        default=1e-3, ge=0, description="Adam's learning rate for activation scales; 0: fixed."
    )
    pattern: Literal["block", "layer"] = Field(default="block", description="Whether to fit blocks or single layers.")

    def blocks(self, context: PtqContext) -> list[ReconstructionBlock]:
        """Residual blocks and parts of chains, or single layers."""
        return find_layers(context) if self.pattern == "layer" else find_blocks(context, self.chain)

    @property
    def uses_fisher(self) -> bool:
        """The setting `fisher`."""
        return self.fisher


class QDrop(Brecq):
    """BRECQ with randomly dropped quantization of activations, including the inputs of each block."""

    name: ClassVar[str] = "qdrop"

    fisher: bool = Field(default=False, description="Weight errors by the squared gradient of the loss.")
    drop: float = Field(default=0.5, ge=0, le=1, description="Share of the values that stay in float.")

    def given(self, replay: Replay, index: int, generator: torch.Generator) -> Values:
        """A random mix of values from the quantized and the float model."""
        exact = replay.values(index, "float")
        rounded = replay.values(index, "quantized")
        return {source: self.quantize(exact[source], x, generator) for source, x in rounded.items()}

    def quantize(self, x: Tensor, rounded: Tensor, generator: torch.Generator) -> Tensor:
        """Choose the float or the rounded value for each element at random."""
        if not x.is_floating_point():
            return rounded
        return torch.where(torch.rand(x.shape, generator=generator).to(x.device) < self.drop, x, rounded)
