"""The five folding strategies, by the numbers that the field knows them by."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bitwright.core.errors import BitwrightError
from bitwright.quantizers.export_sites import snapshot
from bitwright.quantizers.folding.fold import Fold, FoldedCall, over_ranks, syncs, wide


def batch_statistics(norm: nn.Module, x: Tensor, *, sync: bool) -> tuple[Tensor, Tensor, Tensor | int]:
    """Mean, biased variance and count per channel (axis 1) of this step's batch."""
    axes = [axis for axis in range(x.dim()) if axis != 1]
    count = x.numel() // x.shape[1]
    if sync and syncs(norm):
        return _over_processes(norm, wide(x), axes, count)
    if count == 1:
        raise BitwrightError(
            "batch statistics need more than one value per channel",
            value=list(x.shape),
            fix="use a larger batch, or put this norm into eval mode",
        )
    variance, mean = torch.var_mean(wide(x), axes, correction=0)
    return mean, variance, count


def _over_processes(norm: nn.Module, x: Tensor, axes: list[int], count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The statistics of the joint batch; ranks may have batches of unequal size.

    Sums first, then squares around the joint mean: E[x²] − E[x]² would cancel in float32.
    """
    own = torch.cat([x.sum(axes), x.new_full((1,), float(count))])
    total = over_ranks(norm, own)
    joint = total[-1].detach()
    mean = total[:-1] / joint
    shape = [-1] + [1] * (x.dim() - 2)
    squares = (x - mean.reshape(shape)).square().sum(axes)
    variance = over_ranks(norm, squares) / joint
    return mean, variance, joint


def update_running(norm: Any, mean: Tensor, variance: Tensor, count: Tensor | int, *, counted: bool) -> None:
    """Take a batch into the running statistics, as the norm itself would have done.

    `counted`: whether this batch is in `num_batches_tracked` already, which the norm's own forward sees to.
    """
    momentum = norm.momentum
    if momentum is None:  # the average of all batches
        momentum = 1.0 / (norm.num_batches_tracked.double() + (0 if counted else 1))
    unbiased = variance.detach() * (count / (count - 1))
    with torch.no_grad():
        for running, new in ((norm.running_mean, mean.detach()), (norm.running_var, unbiased)):
            running.copy_((1 - momentum) * running + momentum * new.to(running.dtype))


class FrozenFold(Fold):
    """Fold with running μ and σ at each step."""

    def train(self, call: FoldedCall) -> Tensor:
        """As in eval mode, with gradients."""
        return self.deployed(call)

    def norm_in_training(self, x: Tensor) -> Tensor:
        """Nothing: the operator has done it all."""
        norm: Any = self.norm
        if norm.num_batches_tracked is not None:
            # the norm's forward has counted a batch that no statistic took in
            norm.num_batches_tracked.sub_(1)
        return x


class StaticFold(FrozenFold):
    """Fold with everything of the norm fixed."""

    def affine(self) -> tuple[Tensor | None, Tensor | None]:
        """γ and β as constants."""
        gamma, beta = super().affine()
        return (None if gamma is None else gamma.detach()), (None if beta is None else beta.detach())

    def attached(self) -> None:
        """Tell optimizers and DDP, which waits for the gradient of every parameter that wants one."""
        super().attached()
        self.trained = [p for p in self._own() if p.requires_grad]
        for parameter in self.trained:
            parameter.requires_grad_(False)

    def detached(self) -> None:
        """What trained before trains again."""
        for parameter in self.trained:
            parameter.requires_grad_(True)

    def _own(self) -> list[nn.Parameter]:
        return list(self.norm.parameters(recurse=False))


class BatchFold(Fold):
    """Fold with batch μ and σ."""

    def train(self, call: FoldedCall) -> Tensor:
        """Convolve for the statistics, then with the folded weight."""
        mean, variance = self.observe(call)
        factor = self.factor(variance)
        return call(self.quantized_weight(call, factor), self.shift(call, factor, mean))

    def norm_in_training(self, x: Tensor) -> Tensor:
        """Nothing: the operator has normalised already."""
        return x

    def observe(self, call: FoldedCall) -> tuple[Tensor, Tensor]:
        """Mean and variance of what the norm would be given; they also go into the running ones."""
        norm: Any = self.norm
        mean, variance, count = batch_statistics(norm, call(call.weight, None), sync=self.sync)
        if call.bias is not None:
            # it cancels in the output, but the running mean has it, and DDP waits for its gradient (zero)
            mean = mean + call.bias
        update_running(norm, mean, variance, count, counted=False)
        return mean, variance


class CorrectedFold(BatchFold):
    """Fold with running σ, rescale to that of the batch; the bias is the batch's."""

    def train(self, call: FoldedCall) -> Tensor:
        """Convolve for the statistics, then with the deployed weight, then correct."""
        norm: Any = self.norm
        # `observe` updates the running variance, and a compiled backward that computes γ/σ again would take the
        # new one: gradients would be wrong. A snapshot can't be recomputed.
        running = snapshot(norm.running_var)
        mean, variance = self.observe(call)
        shift = self.shift(call, self.factor(variance), mean)
        result = call(self.quantized_weight(call, self.factor(running)), None)
        correction = self.inverse(variance) / self.inverse(running)
        return result * self.over_output(correction, result) + self.over_output(shift, result)


_SMALLEST = 1e-30  # a dead channel (γ = 0) must not divide by zero


class ExplicitFold(Fold):
    """Fold for rounding only."""

    def train(self, call: FoldedCall) -> Tensor:
        """The operator's own output, but for the rounding."""
        norm: Any = self.norm
        # The norm updates its variance later in the same forward, and a compiled backward that computes γ/σ again
        # would take the new one: gradients would be wrong. A snapshot can't be recomputed.
        compiling = torch.compiler.is_compiling()
        factor = self.factor(snapshot(norm.running_var) if compiling else norm.running_var)
        safe = torch.where(factor.abs() < _SMALLEST, 1.0, factor)
        # Dividing the rounded weight divides the output, which is larger by far.
        weight = call.quantize_weight(wide(call.weight), factor=self.spread(safe, call.weight))
        return call(weight, call.bias)

    def norm_in_training(self, x: Tensor) -> Tensor | None:
        """The norm itself, or its formulas: where processes share statistics, and where torch can't compile it."""
        norm: Any = self.norm
        # Without a momentum the norm hands its operator a number that a compiler doesn't know: 1/(batches so far).
        if norm.momentum is not None and not (self.sync and syncs(norm)):
            return None
        mean, variance, count = batch_statistics(norm, x, sync=self.sync)
        update_running(norm, mean, variance, count, counted=True)
        factor = self.factor(variance)
        _, beta = self.affine()
        shift = -mean * factor if beta is None else beta - mean * factor
        return x * self.over_output(factor, x) + self.over_output(shift, x)
