"""Calls of the INT8 kernel with their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bitwright.kernels.int8 import Int8
from bitwright.plan import ComputeSpec

CALLS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "linear": (F.linear, (4, 5, 32), (24, 32), {}),
    "conv": (F.conv2d, (3, 8, 9, 9), (16, 8, 3, 3), {"padding": 1}),
    "strided": (F.conv2d, (3, 8, 9, 9), (16, 8, 3, 3), {"padding": 1, "stride": 2}),
    "dilated": (F.conv2d, (2, 8, 12, 12), (8, 8, 3, 3), {"padding": 2, "dilation": 2}),
    "depthwise": (F.conv2d, (3, 16, 9, 9), (16, 1, 3, 3), {"padding": 1, "groups": 16}),
    "pointwise": (F.conv2d, (3, 16, 9, 9), (24, 16, 1, 1), {}),
    "asymmetric": (F.conv2d, (2, 8, 10, 12), (8, 8, 3, 5), {"padding": (1, 2)}),
    "conv1d": (F.conv1d, (3, 16, 20), (24, 16, 5), {"padding": 2}),
}


def run(
    name: str, spec: ComputeSpec | None, *, simulate: bool = False, positive: bool = False, last: bool = False
) -> tuple[Tensor, ...]:
    """Output and gradients of input, weight and bias."""
    func, inputs, weights, options = CALLS[name]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(inputs, generator=generator)
    x = x.relu() if positive else x
    if last:
        x = x.to(memory_format=torch.channels_last)
    x.requires_grad_()
    weight = (torch.randn(weights, generator=generator) * 0.2).requires_grad_()
    bias = torch.randn(weights[0], generator=generator).requires_grad_()
    if spec is None:
        y = func(x, weight, bias, **options)
    else:
        y = Int8(spec, simulate=simulate)(func, (x, weight, bias), options)
    y.backward(torch.randn(y.shape, generator=generator))
    assert x.grad is not None
    assert weight.grad is not None
    assert bias.grad is not None
    return y.detach(), x.grad, weight.grad, bias.grad
