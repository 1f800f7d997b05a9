"""Fold batch norms into the preceding operator at run time: the deployed arithmetic and the five strategies.

In eval mode, all strategies run the operator with w·γ/σ and the corresponding bias, and the norm returns its input, as
in a deployed graph. A strategy defines what happens in training; MQBench numbers the strategies in the same way. The
parameters and keys of the float model don't change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bitwright.core.errors import BitwrightError
from bitwright.graph.operators import channel_axis
from bitwright.plan import FoldSpec
from bitwright.quantizers.export_sites import site_marker, snapshot

__all__ = ["BY_STRATEGY", "Fold", "make_fold"]

# A custom operator can't take a process group as an argument, so it takes the group's name. "" is the default group.
_GROUPS: dict[str, Any] = {}


def register_group(norm: nn.Module) -> None:
    """Store the process group of a norm by name."""
    group: Any = getattr(norm, "process_group", None)
    if group is not None:
        _GROUPS[group.group_name] = group


def syncs(norm: nn.Module) -> bool:
    """Whether statistics are shared with other processes."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(_group(norm)) > 1


def sum_over_group(norm: nn.Module, x: Tensor) -> Tensor:
    """Sum `x` over the processes of the norm's group."""
    group = _group(norm)
    total: Tensor = sum_over_ranks(x, "" if group is None else group.group_name)
    return total


def _group(norm: nn.Module) -> Any:
    # looked up in each call: a process group can't be copied or saved with the model
    return getattr(norm, "process_group", None)


@torch.library.custom_op("bitwright::sum_over_ranks", mutates_args=())
def sum_over_ranks(x: Tensor, group: str) -> Tensor:
    """Sum `x` over the processes of the group with this name."""
    total = x.contiguous().clone()
    dist.all_reduce(total, group=_GROUPS[group] if group else None)
    return total


@sum_over_ranks.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return torch.empty_like(x)


def _keep_group(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.group = inputs[1]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    # the loss of every rank depends on the inputs of all ranks
    return sum_over_ranks(grad, ctx.group), None


sum_over_ranks.register_autograd(_backward, setup_context=_keep_group)


class FoldedCall:
    """One call of the operator with a folded norm, and the quantizers of its weight and bias."""

    def __init__(
        self,
        func: Callable[..., Tensor],
        args: list[Any],
        kwargs: dict[str, Any],
        quantize_weight: Callable[..., Tensor] | None,
        quantize_bias: Callable[[Tensor], Tensor] | None,
    ) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.quantize_weight = quantize_weight or _same
        self.quantizes = quantize_weight is not None
        self.quantize_bias = quantize_bias
        self.weight: Tensor = args[1] if len(args) > 1 else kwargs["weight"]
        self.bias: Tensor | None = args[2] if len(args) > 2 else kwargs.get("bias")

    def __call__(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Run the operator with this weight and bias."""
        # a conversion to the same type would be an operator of exported programs
        dtype = self.weight.dtype
        self._put(1, "weight", weight if weight.dtype == dtype else weight.to(dtype))
        self._put(2, "bias", bias if bias is None or bias.dtype == dtype else bias.to(dtype))
        return self.func(*self.args, **self.kwargs)

    def _put(self, index: int, name: str, value: Any) -> None:
        if index < len(self.args):
            self.args[index] = value
        else:
            self.kwargs[name] = value


class Fold:
    """A norm and the kind of the operator that it is folded into. Subclasses are strategies."""

    def __init__(self, norm: nn.Module, kind: str, site: str, *, sync: bool = False) -> None:
        self.norm = norm
        self.kind = kind
        self.site = site  # the site of the folded bias, for the artefact
        self.sync = sync or isinstance(norm, nn.SyncBatchNorm)
        self.axis = channel_axis(kind, "weight")
        self.marking = False
        self.bias: Tensor | None = None  # the last folded bias, kept during export
        self.holding = False  # while weights are constant and unquantized, fold only once
        self.held: tuple[Tensor, Tensor] | None = None  # the weight and bias that were folded once

    # -- defined by strategies -----------------------------------------------------------------------------

    def train(self, call: FoldedCall) -> Tensor:
        """Run the operator in a training step."""
        raise NotImplementedError

    def norm_in_training(self, x: Tensor) -> Tensor | None:
        """The norm's output in a training step; None runs the norm itself."""
        raise NotImplementedError

    def affine(self) -> tuple[Tensor | None, Tensor | None]:
        """γ and β, with gradients."""
        norm: Any = self.norm
        return norm.weight, norm.bias

    def attached(self) -> None:
        """Called after the model is prepared."""
        register_group(self.norm)

    def detached(self) -> None:
        """Called after the model is stripped: restore the norm."""

    # -- implementation ------------------------------------------------------------------------------------

    def run(self, call: FoldedCall) -> Tensor:
        """Run the operator with the folded, quantized weight and bias."""
        return self.train(call) if self.norm.training else self.deployed(call)

    def norm_output(self, x: Tensor) -> Tensor | None:
        """The norm's output; None runs the norm itself."""
        return self.norm_in_training(x) if self.norm.training else x

    def deployed(self, call: FoldedCall) -> Tensor:
        """Run with w·γ/σ and β + (b − μ)·γ/σ from running statistics, as the artefact does."""
        if self.held is not None:
            return call(*self.held)
        norm: Any = self.norm
        # Artefacts get the values of a real forward, so tracing doesn't need the folding arithmetic. In a small model,
        # that arithmetic is most of the operators and most of torch.export's time.
        if self.marking and call.quantizes:
            weight, shift = call.quantize_weight(wide(call.weight)), wide(norm.running_mean)
        else:
            factor = self.factor(norm.running_var)
            weight, shift = self.quantized_weight(call, factor), self.shift(call, factor, norm.running_mean)
        if call.quantize_bias is not None:
            shift = call.quantize_bias(shift)
        elif self.marking:
            shift = site_marker(shift, self.site)
        elif not torch.compiler.is_compiling():
            self.bias = shift.detach()
        if self.holding:
            self.held = weight, shift
        return call(weight, shift)

    # -- parts of the formulas, in float32 or float64 ------------------------------------------------------

    def inverse(self, variance: Tensor) -> Tensor:
        """1/σ per output channel."""
        norm: Any = self.norm
        return torch.rsqrt(wide(variance) + norm.eps)

    def factor(self, variance: Tensor) -> Tensor:
        """γ/σ per output channel."""
        gamma, _ = self.affine()
        return self.inverse(variance) if gamma is None else self.inverse(variance) * wide(gamma)

    @torch.no_grad()
    def unit(self) -> Tensor:
        """γ/σ with running statistics: the ratio of the folded weight to the weight."""
        norm: Any = self.norm
        return self.factor(norm.running_var)

    def shift(self, call: FoldedCall, factor: Tensor, mean: Tensor) -> Tensor:
        """The folded bias β + (b − μ)·γ/σ."""
        _, beta = self.affine()
        start = -wide(mean) if call.bias is None else wide(call.bias) - wide(mean)
        return start * factor if beta is None else start * factor + wide(beta)

    def quantized_weight(self, call: FoldedCall, factor: Tensor) -> Tensor:
        """The quantized product of weight and factor."""
        return call.quantize_weight(wide(call.weight) * self.spread(factor, call.weight))

    def over_output(self, values: Tensor, result: Tensor) -> Tensor:
        """One value per channel, in a shape that broadcasts against the operator's output."""
        # channels are axis 1 of a convolution's output and the last axis of a linear's
        shape = [-1] if self.kind == "linear" else [-1] + [1] * (result.dim() - 2)
        return values.reshape(shape).to(result.dtype)

    def spread(self, factor: Tensor, weight: Tensor) -> Tensor:
        """The factor in a shape that broadcasts against the weight."""
        sizes = [1] * weight.dim()
        groups = factor.numel() // weight.shape[self.axis]
        if groups > 1:  # in a transposed convolution, this axis has only the channels of one group
            sizes[:2] = weight.shape[:2]
            return factor.reshape(groups, -1).repeat_interleave(sizes[0] // groups, dim=0).reshape(sizes)
        sizes[self.axis] = -1
        return factor.reshape(sizes)


def _same(x: Tensor, *, factor: Tensor | None = None) -> Tensor:
    return x


def wide(x: Tensor) -> Tensor:
    """`x` in float32, or unchanged if it is float64."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


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
        self.trained = [p for p in self._affine_parameters() if p.requires_grad]
        for parameter in self.trained:
            parameter.requires_grad_(False)

    def detached(self) -> None:
        """Enable the gradients that were enabled before."""
        for parameter in self.trained:
            parameter.requires_grad_(True)

    def _affine_parameters(self) -> list[nn.Parameter]:
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
            # the bias cancels in the output, but the running mean includes it, and DDP waits for its (zero) gradient
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


BY_STRATEGY: dict[int, type[Fold]] = {0: StaticFold, 1: FrozenFold, 2: BatchFold, 3: CorrectedFold, 4: ExplicitFold}


def make_fold(spec: FoldSpec, norm: nn.Module, kind: str, site: str) -> Fold:
    """Create the fold of a plan's entry. `site` is the site of the folded bias."""
    return BY_STRATEGY[spec.strategy](norm, kind, site, sync=spec.sync)
