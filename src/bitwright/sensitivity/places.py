"""Operators with places for errors: what a low-precision kernel may get wrong, each place by itself.

An operator that multiplies two tensors makes three products in a training step: its output, the gradient of its left
operand and that of its right one. A kernel rounds the operands of each. `Places` runs the operator in float and keeps a
tensor for each rounding, so that autograd can say how the gradients of the model move with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bitwright.kernels.calls import arguments, each_axis, padded


@dataclass(frozen=True)
class Products:
    """The three products of an operator without bias."""

    kind: str
    forward: Callable[[Tensor, Tensor], Tensor]
    #: The gradient of the left operand, from (gradient of the output, left, right); None where it has none.
    to_left: Callable[[Tensor, Tensor, Tensor], Tensor] | None
    to_right: Callable[[Tensor, Tensor, Tensor], Tensor]
    #: Of convolutions: stride, padding, dilation, groups.
    shape: tuple[Any, ...] = ()


@dataclass
class Seen:
    """One call of an operator: its numbers, and the tensors that stand for errors.

    Places: the operands of the output, `left` and `right`; those of the backward products, `left_again`, `right_again`
    and the output's gradient in each, `grad_for_left` and `grad_for_right`; what the products give, `out`, `to_left`
    and `to_right`.
    """

    products: Products
    places: dict[str, Tensor]
    #: The function that the model calls.
    func: Callable[..., Any]
    #: The gradient of the output, known after the backward pass.
    grad: Tensor | None = None
    #: What the products gave, by place.
    given: dict[str, Tensor] = field(default_factory=dict)

    @property
    def channel(self) -> int:
        """The axis of channels of what comes and what goes."""
        return 1 if self.products.shape else -1

    def rows(self, x: Tensor) -> Tensor:
        """Samples of a convolution, tokens of anything else: what kernels give a scale of its own."""
        return x if self.products.shape else x.reshape(-1, x.shape[-1])

    @property
    def left(self) -> Tensor:
        """Its left operand."""
        return self.places["left"].detach()

    @property
    def right(self) -> Tensor:
        """Its right operand: the weight, if it has one."""
        return self.places["right"].detach()


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, seen: Seen, *operands: Tensor) -> Tensor:
        left, right = operands[:2]
        ctx.seen = seen
        ctx.save_for_backward(*operands[2:])
        return seen.products.forward(left, right)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Made of differentiable functions: errors in here are errors of the gradients."""
        left, right, zero = ctx.saved_tensors
        seen: Seen = ctx.seen
        # the second backward pass comes by again, through what the gradients were made of: there is no error in it
        first_pass = seen.grad is None
        if first_pass:
            seen.grad = grad.detach()

        def product(function: Callable[..., Tensor], side: str) -> Tensor:
            if not first_pass:
                return function(grad, left, right)
            seen.places[f"grad_for_{side}"] = error = zero.expand(grad.shape)
            result = function(grad + error, left, right)
            seen.given[f"to_{side}"] = result.detach()
            seen.places[f"to_{side}"] = error = zero.expand(result.shape)
            given: Tensor = result + error
            return given

        products = seen.products
        to_left = None
        if ctx.needs_input_grad[1] and products.to_left is not None:
            to_left = product(products.to_left, "left")
        to_right = product(products.to_right, "right") if ctx.needs_input_grad[2] else None
        return None, to_left, to_right, None, None, None


class Places:
    """Stands where a kernel would: runs the call in float, and keeps what there is to know of it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.calls: list[Seen] = []

    def __call__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call; one that kernels leave in float is left alone."""
        known: dict[str, Callable[..., Found]] = {"linear": _linear, "embedding": _embedding, "matmul": _matmul}
        find: Callable[..., Found] = known.get(self.kind, _conv)
        named = arguments(func, args, kwargs)
        found = None if named is None else find(**named)
        if found is None:
            return func(*args, **kwargs)
        products, left, right, bias = found
        # data and frozen weights have no gradient, but errors
        left, right = (_with_gradient(x) for x in (left, right))
        operands = {name: x.view_as(x) for name, x in (("left", left), ("right", right))}
        operands |= {f"{name}_again": x.view_as(x) for name, x in (("left", left), ("right", right))}
        seen = Seen(products, operands, func)
        zero = torch.zeros((), dtype=right.dtype, device=right.device, requires_grad=True)
        out: Tensor = _Run.apply(seen, *operands.values(), zero)  # type: ignore[no-untyped-call]
        seen.places["out"] = out
        seen.given["out"] = out.detach()
        self.calls.append(seen)
        return out if bias is None else out + bias.view(-1, *(1,) * (out.dim() - 2 if products.shape else 0))


def _with_gradient(x: Tensor) -> Tensor:
    return x if x.requires_grad or not x.is_floating_point() else x.detach().requires_grad_()


Found = tuple[Products, Tensor, Tensor, Tensor | None] | None


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Found:
    if weight.dim() != 2:
        return None
    products = Products(
        "linear",
        F.linear,
        lambda grad, left, right: grad @ right,
        lambda grad, left, right: grad.reshape(-1, grad.shape[-1]).t() @ left.reshape(-1, left.shape[-1]),
    )
    return products, input, weight, bias


def _conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Found:
    if input.dim() != weight.dim():
        return None
    dims = weight.dim() - 2
    apart = each_axis(dilation, dims)
    input, sides = padded(input, weight, padding, apart)
    shape = (each_axis(stride, dims), sides, apart)
    run: Callable[..., Tensor] = F.conv1d if dims == 1 else F.conv2d

    def back(grad: Tensor, left: Tensor, right: Tensor, which: int) -> Tensor:
        lists = [list(part) for part in shape]
        wants = [which == 0, which == 1, False]
        found: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
            grad, left, right, None, *lists, False, [0] * dims, groups, wants
        )
        return found[which]

    products = Products(
        f"conv{dims}d",
        lambda left, right: run(left, right, None, *shape, groups),
        lambda grad, left, right: back(grad, left, right, 0),
        lambda grad, left, right: back(grad, left, right, 1),
        (*shape, groups),
    )
    return products, input, weight, bias


def _matmul(input: Tensor, other: Tensor) -> Found:
    if min(input.dim(), other.dim()) < 2:
        return None
    lead = torch.broadcast_shapes(input.shape[:-2], other.shape[:-2])
    products = Products(
        "matmul",
        torch.matmul,
        lambda grad, left, right: grad @ right.transpose(-1, -2),
        lambda grad, left, right: left.transpose(-1, -2) @ grad,
    )
    return products, input.expand(*lead, *input.shape[-2:]), other.expand(*lead, *other.shape[-2:]), None


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Found:
    if max_norm is not None or scale_grad_by_freq or sparse:
        return None
    skipped = -1 if padding_idx is None else padding_idx % weight.shape[0]
    products = Products(
        "embedding",
        lambda left, right: F.embedding(left, right),
        None,
        lambda grad, left, right: torch.ops.aten.embedding_dense_backward(grad, left, right.shape[0], skipped, False),
    )
    return products, input, weight, None
