"""Batch norm folded into the operator before it, on the fly: the float model keeps its parameters and keys.

In eval mode the operator runs with w·γ/σ and the matching bias, and the norm passes its input on: what
a deployed graph does. In training the weight is quantized as it will be deployed, w·γ/σ with running
statistics, the output is divided by γ/σ again and the norm runs on the batch: gradients and statistics
are those of training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.attach.markers import site_marker, snapshot
from bitwright.graph.functions import channel_axis

_SMALLEST = 1e-12  # a dead channel (γ = 0) must not divide by zero


class Fold:
    """A norm and the kind of operator that it is folded into."""

    def __init__(self, norm: nn.Module, kind: str, site: str) -> None:
        self.norm = norm
        self.kind = kind
        self.site = site  # of the folded bias, for the artefact
        self.axis = channel_axis(kind, "weight")
        self.marking = False
        self.bias: Tensor | None = None  # the last folded bias, kept while an artefact is written

    def factor(self) -> Tensor:
        """γ/σ per output channel, float32."""
        norm: Any = self.norm
        # In training the norm updates its variance later in the same forward, and a compiled backward that
        # computes γ/σ again would take the new one: gradients would be wrong. A snapshot can't be recomputed.
        variance = snapshot(norm.running_var) if norm.training else norm.running_var
        factor = torch.rsqrt(variance.float() + norm.eps)
        return factor if norm.weight is None else factor * norm.weight.float()

    def _spread(self, factor: Tensor, weight: Tensor) -> Tensor:
        """The factor as it broadcasts against the weight."""
        sizes = [1] * weight.dim()
        groups = factor.numel() // weight.shape[self.axis]
        if groups > 1:  # a transposed convolution has only the channels of one group on that axis
            sizes[:2] = weight.shape[:2]
            return factor.reshape(groups, -1).repeat_interleave(sizes[0] // groups, dim=0).reshape(sizes)
        sizes[self.axis] = -1
        return factor.reshape(sizes)

    def run(
        self,
        func: Callable[..., Tensor],
        args: list[Any],
        kwargs: dict[str, Any],
        quantize_weight: Callable[[Tensor], Tensor],
        quantize_bias: Callable[[Tensor], Tensor] | None,
    ) -> Tensor:
        """The operator with the folded, quantized weight and bias."""
        norm: Any = self.norm
        weight, bias = _take(args, kwargs, 1, "weight"), _take(args, kwargs, 2, "bias")
        dtype = weight.dtype
        factor = self.factor()
        if norm.training:
            safe = torch.where(factor.abs() < _SMALLEST, torch.ones_like(factor), factor)
            folded = quantize_weight(weight.float() * self._spread(safe, weight)).to(dtype)
            _put(args, kwargs, 1, "weight", folded)
            _put(args, kwargs, 2, "bias", None)
            result = func(*args, **kwargs)
            # channels are axis 1 of a convolution's output and the last one of a linear's
            shape = [-1] if self.kind == "linear" else [-1] + [1] * (result.dim() - 2)
            result = result / safe.reshape(shape).to(result.dtype)
            return result if bias is None else result + bias.reshape(shape).to(result.dtype)
        folded = quantize_weight(weight.float() * self._spread(factor, weight)).to(dtype)
        start = -norm.running_mean.float() if bias is None else bias.float() - norm.running_mean.float()
        shift = start * factor
        if norm.bias is not None:
            shift = shift + norm.bias.float()
        if quantize_bias is not None:
            shift = quantize_bias(shift)
        elif self.marking:
            shift = site_marker(shift, self.site)
        elif not torch.compiler.is_compiling():
            self.bias = shift.detach()
        _put(args, kwargs, 1, "weight", folded)
        _put(args, kwargs, 2, "bias", shift.to(dtype))
        return func(*args, **kwargs)


def _take(args: list[Any], kwargs: dict[str, Any], index: int, name: str) -> Any:
    return args[index] if index < len(args) else kwargs.get(name)


def _put(args: list[Any], kwargs: dict[str, Any], index: int, name: str, value: Any) -> None:
    if index < len(args):
        args[index] = value
    else:
        kwargs[name] = value
