"""The errors that a kernel makes at each place of an operator: variances, number by number.

Rounding to the nearest code is off by some part of half a step: s²/12 in the mean, and nothing for a number that is a
code, as the zeros after a ReLU are. So the squared error itself is taken. Rounding at random to one of two neighbours,
up with probability f, has variance s²·f(1 − f), in the mean s²/6. Floating-point numbers have steps of 2^(e−k) each.
Scales are found by the kernels' own functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from bitwright.kernels.codes import FULL, as_second, encode, encode_rows
from bitwright.kernels.int8 import can_turn, second_limit, turn
from bitwright.plan import ComputeSpec
from bitwright.sensitivity.places import Seen

Error = tuple[tuple[str, ...], Tensor]
"""The places which share an error, and its variance for each number."""
Errors = Callable[[Seen, ComputeSpec], Iterator[Error]]


def variance(x: Tensor, *, stochastic: bool = False, signed: bool = False) -> Tensor:
    """Of the codes of a tensor with one scale."""
    codes = encode(x, signed=signed)
    if not stochastic:
        return (codes.float() - x).square_()
    part = x / codes.scale
    part -= part.floor()
    return part * (1 - part) * codes.scale**2


def row_variance(x: Tensor, limit: int) -> Tensor:
    """Of the codes of a tensor with a scale for each row of the first axis."""
    return (encode_rows(x, limit).float() - x).square_()


def cast_variance(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Of floating-point numbers of fewer bits."""
    return (x.to(dtype).to(x.dtype) - x).square_()


def int8_errors(seen: Seen, spec: ComputeSpec) -> Iterator[Error]:
    """As kernels/int8.py runs its products."""
    kind = seen.products.kind
    if kind == "matmul":
        yield from _int8_matmul(seen, spec)
        return
    if kind == "embedding":
        yield ("right",), row_variance(seen.right, FULL)
        return
    left, weight, grad = seen.left, seen.right, seen.grad
    limit = second_limit(left)
    yield ("left", "left_again"), variance(left)  # the codes are kept for the backward pass
    yield ("right",), row_variance(weight, limit)
    if grad is None:
        return
    for_left, for_right = "input" in spec.backward, "weight" in spec.backward
    if seen.products.shape:
        stride, padding, dilation, groups = seen.products.shape
        for_left = for_left and can_turn(stride, padding, dilation, weight)
        for_right = for_right and groups == 1
    if for_left:
        yield ("right_again",), _turned_variance(seen, limit)
    both = tuple(place for place, on in (("grad_for_left", for_left), ("grad_for_right", for_right)) if on)
    if both:
        yield both, variance(grad, stochastic=spec.stochastic, signed=True)
    if for_right:
        codes = encode(grad, signed=True)
        rows = as_second(codes.values.view(grad.shape[0], -1), codes, limit)
        yield ("grad_for_right",), (rows.float().view(grad.shape) - codes.float()).square_()  # halved codes


def _turned_variance(seen: Seen, limit: int) -> Tensor:
    """Weights have other scales when they are read by their inputs."""
    weight = seen.right
    if not seen.products.shape:
        return row_variance(weight.t(), limit).t()
    groups, wide = seen.products.shape[3], weight if weight.dim() == 4 else weight[:, :, None]
    places = torch.arange(wide.numel(), device=wide.device).view(wide.shape)
    back = turn(places, groups).reshape(-1).argsort()
    return row_variance(turn(wide, groups), limit).reshape(-1)[back].view(weight.shape)


def _int8_matmul(seen: Seen, spec: ComputeSpec) -> Iterator[Error]:
    left, right, grad = seen.left, seen.right, seen.grad
    limit = second_limit(left)
    yield ("left",), variance(left)
    yield ("right",), _columns(right, limit)
    if grad is None:
        return
    if "input" in spec.backward:
        yield ("grad_for_left",), variance(grad, stochastic=spec.stochastic)
        yield ("right_again",), _columns(right.transpose(-1, -2), limit).transpose(-1, -2)
    if "weight" in spec.backward:
        yield ("left_again",), variance(left, stochastic=spec.stochastic)
        yield ("grad_for_right",), _columns(grad, limit)


def _columns(x: Tensor, limit: int) -> Tensor:
    """A scale for each column of each matrix."""
    rows = x.transpose(-1, -2)
    found = row_variance(rows.reshape(-1, x.shape[-2]), limit)
    return found.view(rows.shape).transpose(-1, -2)


def cast_errors(dtype: torch.dtype) -> Errors:
    """As kernels/lowfloat.py casts what comes and what goes."""

    def errors(seen: Seen, spec: ComputeSpec) -> Iterator[Error]:
        if seen.left.is_floating_point():
            yield ("left", "left_again"), cast_variance(seen.left, dtype)
        yield ("right", "right_again"), cast_variance(seen.right, dtype)
        if seen.products.kind != "embedding":  # which only picks
            yield ("out",), cast_variance(seen.given["out"], dtype)
        if seen.grad is not None:
            yield ("grad_for_left", "grad_for_right"), cast_variance(seen.grad, dtype)
        for place in ("to_left", "to_right"):
            if place in seen.given:
                yield (place,), cast_variance(seen.given[place], dtype)

    return errors


ERRORS: dict[str, Errors] = {
    "int8": int8_errors,
    "bf16": cast_errors(torch.bfloat16),
    "fp16": cast_errors(torch.float16),
}
"""By kernel."""
