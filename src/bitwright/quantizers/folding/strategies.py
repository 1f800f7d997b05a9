"""The five folding strategies. MQBench numbers them in the same way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bitwright.core.errors import BitwrightError
from bitwright.quantizers.export_sites import snapshot
from bitwright.quantizers.folding.fold import Fold, FoldedCall, sum_over_group, syncs, wide


def batch_statistics(norm: nn.Module, x: Tensor, *, sync: bool) -> tuple[Tensor, Tensor, Tensor | int]:
    """Mean, biased variance and count per channel (axis 1) of the current batch."""
    axes = [axis for axis in range(x.dim()) if axis != 1]
    count = x.numel() // x.shape[1]
    if sync and syncs(norm):
        return _over_processes(norm, wide(x), axes, count)
    if count == 1:
        raise BitwrightError(
            "batch statistics need more than one value per channel",
            value=list(x.shape),
            fix="use a larger batch, or switch this norm to eval mode",
            code="batch-too-small",
        )
    variance, mean = torch.var_mean(wide(x), axes, correction=0)
    return mean, variance, count


def _over_processes(norm: nn.Module, x: Tensor, axes: list[int], count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The statistics of the joint batch. Ranks may have batches of different sizes.

    Computes the joint mean first and then squares around it: E[x²] − E[x]² would cancel in float32.
    """
    own = torch.cat([x.sum(axes), x.new_full((1,), float(count))])
    total = sum_over_group(norm, own)
    joint = total[-1].detach()
    mean = total[:-1] / joint
    shape = [-1] + [1] * (x.dim() - 2)
    squares = (x - mean.reshape(shape)).square().sum(axes)
    variance = sum_over_group(norm, squares) / joint
    return mean, variance, joint


def update_running(norm: Any, mean: Tensor, variance: Tensor, count: Tensor | int, *, counted: bool) -> None:
    """Update the running statistics as the norm itself would.

    `counted`: whether `num_batches_tracked` already includes this batch, because the norm's own forward ran.
    """
    momentum = norm.momentum
    if momentum is None:  # cumulative average
        momentum = 1.0 / (norm.num_batches_tracked.double() + (0 if counted else 1))
    unbiased = variance.detach() * (count / (count - 1))
    with torch.no_grad():
        for running, new in ((norm.running_mean, mean.detach()), (norm.running_var, unbiased)):
            running.copy_((1 - momentum) * running + momentum * new.to(running.dtype))


class FrozenFold(Fold):
    """Fold with running μ and σ in each step. γ and β are trained."""

    def train(self, call: FoldedCall) -> Tensor:
        """Run as in eval mode, with gradients."""
        return self.deployed(call)

    def norm_in_training(self, x: Tensor) -> Tensor:
        """Return the input: the operator includes the norm."""
        norm: Any = self.norm
        if norm.num_batches_tracked is not None:
            # the norm's forward has counted a batch that isn't part of the statistics
            norm.num_batches_tracked.sub_(1)
        return x


class StaticFold(FrozenFold):
    """Fold with running μ and σ and constant γ and β."""

    def affine(self) -> tuple[Tensor | None, Tensor | None]:
        """γ and β as constants."""
        gamma, beta = super().affine()
        return (None if gamma is None else gamma.detach()), (None if beta is None else beta.detach())

    def attached(self) -> None:
        """Disable gradients, for optimizers and for DDP, which waits for the gradient of every trainable parameter."""
        super().attached()
        self.trained = [p for p in self._own() if p.requires_grad]
        for parameter in self.trained:
            parameter.requires_grad_(False)

    def detached(self) -> None:
        """Enable the gradients that were enabled before."""
        for parameter in self.trained:
            parameter.requires_grad_(True)

    def _own(self) -> list[nn.Parameter]:
        return list(self.norm.parameters(recurse=False))


class BatchFold(Fold):
    """Fold with the μ and σ of the batch."""

    def train(self, call: FoldedCall) -> Tensor:
        """Convolve once for the statistics and once with the folded weight."""
        mean, variance = self.observe(call)
        factor = self.factor(variance)
        return call(self.quantized_weight(call, factor), self.shift(call, factor, mean))

    def norm_in_training(self, x: Tensor) -> Tensor:
        """Return the input: the operator includes the norm."""
        return x

    def observe(self, call: FoldedCall) -> tuple[Tensor, Tensor]:
        """Mean and variance of the norm's input. Also updates the running statistics."""
        norm: Any = self.norm
        mean, variance, count = batch_statistics(norm, call(call.weight, None), sync=self.sync)
        if call.bias is not None:
            # it cancels in the output, but the running mean includes it, and DDP waits for its (zero) gradient
            mean = mean + call.bias
        update_running(norm, mean, variance, count, counted=False)
        return mean, variance


class CorrectedFold(BatchFold):
    """Fold with the running σ, then rescale to the σ of the batch. The bias uses batch statistics."""

    def train(self, call: FoldedCall) -> Tensor:
        """Convolve for the statistics, convolve with the deployed weight, then correct."""
        norm: Any = self.norm
        # `observe` updates the running variance. A compiled backward that recomputes γ/σ would use the new one and give
        # wrong gradients. A snapshot can't be recomputed.
        running = snapshot(norm.running_var)
        mean, variance = self.observe(call)
        shift = self.shift(call, self.factor(variance), mean)
        result = call(self.quantized_weight(call, self.factor(running)), None)
        correction = self.inverse(variance) / self.inverse(running)
        return result * self.over_output(correction, result) + self.over_output(shift, result)


_SMALLEST = 1e-30  # prevents a division by zero for a dead channel (γ = 0)


class ExplicitFold(Fold):
    """Fold for rounding only, then run the norm."""

    def train(self, call: FoldedCall) -> Tensor:
        """The operator's own output, except for the rounding."""
        norm: Any = self.norm
        # The norm updates its variance later in this forward. A compiled backward that recomputes γ/σ would use the new
        # one and give wrong gradients. A snapshot can't be recomputed.
        compiling = torch.compiler.is_compiling()
        factor = self.factor(snapshot(norm.running_var) if compiling else norm.running_var)
        safe = torch.where(factor.abs() < _SMALLEST, 1.0, factor)
        # Dividing the rounded weight is cheaper than dividing the output, which is much larger.
        weight = call.quantize_weight(wide(call.weight), factor=self.spread(safe, call.weight))
        return call(weight, call.bias)

    def norm_in_training(self, x: Tensor) -> Tensor | None:
        """Run the norm, or its formulas if processes share statistics or torch can't compile the norm."""
        norm: Any = self.norm
        # Without momentum, the norm passes its operator a number that a compiler doesn't know: 1/(batches so far).
        if norm.momentum is not None and not (self.sync and syncs(norm)):
            return None
        mean, variance, count = batch_statistics(norm, x, sync=self.sync)
        update_running(norm, mean, variance, count, counted=True)
        factor = self.factor(variance)
        _, beta = self.affine()
        shift = -mean * factor if beta is None else beta - mean * factor
        return x * self.over_output(factor, x) + self.over_output(shift, x)
