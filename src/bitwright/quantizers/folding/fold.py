"""What all folding strategies have in common: the deployed arithmetic, and the frame of a training step.

In eval mode, whatever the strategy, the operator runs with w·γ/σ and the matching bias, and the norm passes its
input on: what a deployed graph does. A strategy says what happens in training. The float model keeps its
parameters and keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bitwright.graph.operators import channel_axis
from bitwright.quantizers.export_sites import site_marker

# A process group is no argument of an operator, its name is. "" is the default group.
_GROUPS: dict[str, Any] = {}


def remember_group(norm: nn.Module) -> None:
    """Make the group of a norm that has one of its own known by name."""
    group: Any = getattr(norm, "process_group", None)
    if group is not None:
        _GROUPS[group.group_name] = group


def syncs(norm: nn.Module) -> bool:
    """Whether there are other processes to share statistics with."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(_group(norm)) > 1


def over_ranks(norm: nn.Module, x: Tensor) -> Tensor:
    """The sum of `x` over the processes of the norm's group."""
    group = _group(norm)
    total: Tensor = sum_over_ranks(x, "" if group is None else group.group_name)
    return total


def _group(norm: nn.Module) -> Any:
    # asked at each call: a process group can be neither copied nor saved with the model
    return getattr(norm, "process_group", None)


@torch.library.custom_op("bitwright::sum_over_ranks", mutates_args=())
def sum_over_ranks(x: Tensor, group: str) -> Tensor:
    """The sum of `x` over the processes of the group of that name."""
    total = x.contiguous().clone()
    dist.all_reduce(total, group=_GROUPS[group] if group else None)
    return total


@sum_over_ranks.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return torch.empty_like(x)


def _keep_group(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.group = inputs[1]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    # every rank's loss depends on every rank's part
    return sum_over_ranks(grad, ctx.group), None


sum_over_ranks.register_autograd(_backward, setup_context=_keep_group)


class FoldedCall:
    """One call of the operator that takes in a norm, with what quantizes its weight and bias."""

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
        """Run the operator with this weight and bias instead of its own."""
        self._put(1, "weight", weight.to(self.weight.dtype))
        self._put(2, "bias", None if bias is None else bias.to(self.weight.dtype))
        return self.func(*self.args, **self.kwargs)

    def _put(self, index: int, name: str, value: Any) -> None:
        if index < len(self.args):
            self.args[index] = value
        else:
            self.kwargs[name] = value


class Fold:
    """A norm and the kind of operator that it is folded into. A subclass is a strategy."""

    def __init__(self, norm: nn.Module, kind: str, site: str, *, sync: bool = False) -> None:
        self.norm = norm
        self.kind = kind
        self.site = site  # of the folded bias, for the artefact
        self.sync = sync or isinstance(norm, nn.SyncBatchNorm)
        self.axis = channel_axis(kind, "weight")
        self.marking = False
        self.bias: Tensor | None = None  # the last folded bias, kept while an artefact is written
        self.holding = False  # nothing changes for a while, and nobody quantizes: fold once,
        self.held: tuple[Tensor, Tensor] | None = None  # to this weight and bias

    # -- what a strategy says ------------------------------------------------------------------------------

    def train(self, call: FoldedCall) -> Tensor:
        """The operator in a training step."""
        raise NotImplementedError

    def norm_in_training(self, x: Tensor) -> Tensor | None:
        """What stands in the norm's place in a training step; None lets the norm itself run."""
        raise NotImplementedError

    def affine(self) -> tuple[Tensor | None, Tensor | None]:
        """γ and β as they take part in gradients."""
        norm: Any = self.norm
        return norm.weight, norm.bias

    def attached(self) -> None:
        """The model was prepared."""
        remember_group(self.norm)

    def detached(self) -> None:
        """The model was stripped: leave the norm as it came."""

    # -- the frame -----------------------------------------------------------------------------------------

    def run(
        self,
        func: Callable[..., Tensor],
        args: list[Any],
        kwargs: dict[str, Any],
        quantize_weight: Callable[..., Tensor] | None,
        quantize_bias: Callable[[Tensor], Tensor] | None,
    ) -> Tensor:
        """The operator with the folded, quantized weight and bias."""
        call = FoldedCall(func, args, kwargs, quantize_weight, quantize_bias)
        return self.train(call) if self.norm.training else self.deployed(call)

    def norm_output(self, x: Tensor) -> Tensor | None:
        """What stands in the norm's place; None lets the norm itself run."""
        return self.norm_in_training(x) if self.norm.training else x

    def deployed(self, call: FoldedCall) -> Tensor:
        """w·γ/σ and β + (b − μ)·γ/σ with running statistics: what the artefact computes."""
        if self.held is not None:
            return call(*self.held)
        norm: Any = self.norm
        # Artefacts get the numbers of a real forward. What is marked may as well be traced without the arithmetic,
        # which is most of the operators of a small model, and of the time that torch.export takes.
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

    # -- parts of the formulas, in float32 at least --------------------------------------------------------

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
        """γ/σ with running statistics: how much larger the folded weight is than the weight."""
        norm: Any = self.norm
        return self.factor(norm.running_var)

    def shift(self, call: FoldedCall, factor: Tensor, mean: Tensor) -> Tensor:
        """The folded bias β + (b − μ)·γ/σ."""
        _, beta = self.affine()
        start = -wide(mean) if call.bias is None else wide(call.bias) - wide(mean)
        return start * factor if beta is None else start * factor + wide(beta)

    def quantized_weight(self, call: FoldedCall, factor: Tensor) -> Tensor:
        """The weight times the factor, as it is deployed."""
        return call.quantize_weight(wide(call.weight) * self.spread(factor, call.weight))

    def over_output(self, values: Tensor, result: Tensor) -> Tensor:
        """One value per channel as it broadcasts against the operator's output."""
        # channels are axis 1 of a convolution's output and the last one of a linear's
        shape = [-1] if self.kind == "linear" else [-1] + [1] * (result.dim() - 2)
        return values.reshape(shape).to(result.dtype)

    def spread(self, factor: Tensor, weight: Tensor) -> Tensor:
        """The factor as it broadcasts against the weight."""
        sizes = [1] * weight.dim()
        groups = factor.numel() // weight.shape[self.axis]
        if groups > 1:  # a transposed convolution has only the channels of one group on that axis
            sizes[:2] = weight.shape[:2]
            return factor.reshape(groups, -1).repeat_interleave(sizes[0] // groups, dim=0).reshape(sizes)
        sizes[self.axis] = -1
        return factor.reshape(sizes)


def _same(x: Tensor, *, factor: Tensor | None = None) -> Tensor:
    return x


def wide(x: Tensor) -> Tensor:
    """`x` in float32, or in float64 if it is that already."""
    return x if x.dtype == torch.float64 else x.float()
