"""gradient-variance: the variance that low precision in one operator adds to the gradients of the whole model.

To first order, rounding errors ε at the places of an operator (error_injection.py) change the gradients g by J·ε, where
J is the derivative of g with respect to the places. Errors are independent, so E‖J·ε‖² = Σᵢ ‖Jᵢ‖²·var(εᵢ). For a vector
u of random signs, E(uᵀJ)ᵢ² = ‖Jᵢ‖², and uᵀJ is the derivative of the single number u·g. A second backward pass computes
it for all places of all operators at once. The method makes no assumption about the model between the operators.
docs/indicators.md contains the derivation.

The errors of a kernel are computed element by element. Rounding to nearest has an error of up to half a step: s²/12 on
average, and zero for values that are exact codes, such as the zeros after a ReLU. The actual errors are therefore used.
Stochastic rounding to one of two neighbours, up with probability f, has variance s²·f(1 − f), s²/6 on average.
Floating-point numbers have individual steps of 2^(e−k). Scales are computed with the kernels' own functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import pi, sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from bitwright.core.registry import KERNELS
from bitwright.kernels.codes import FULL, encode, encode_rows
from bitwright.kernels.int8 import gradients_in_float, steps_of
from bitwright.kernels.products import second_limit, turn
from bitwright.plan import ComputeSpec
from bitwright.sensitivity.error_injection import (
    CallRecorder,
    OperatorCall,
    substitutable_operators,
    training_batch_norms,
)
from bitwright.sensitivity.operator_scores import Subject, Values
from bitwright.workload import call, trainable_parameters

_RELUS = {F.relu, torch.relu, torch.Tensor.relu}
_IN_PLACE = {F.relu_, torch.relu_, torch.Tensor.relu_}


class _SmoothStep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, width: Tensor, mode: SmoothRelus) -> Tensor:
        ctx.save_for_backward(x, width)
        ctx.mode = mode
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if not ctx.mode.curved:
            return None, None, None
        x, width = ctx.saved_tensors
        return grad * (x.abs() < width) / (2 * width), None, None


class _SmoothRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mode: SmoothRelus) -> Tensor:
        ctx.save_for_backward(x)
        ctx.mode = mode
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        width = x.detach().square().mean().sqrt() * (ctx.mode.noise * sqrt(pi / 8))
        width = width.clamp(min=torch.finfo(x.dtype).tiny)
        step: Tensor = _SmoothStep.apply(x, width, ctx.mode)  # type: ignore[no-untyped-call]
        return grad * step, None


class SmoothRelus(TorchFunctionMode):
    """Makes the slope of ReLUs differentiable; `noise` is the expected size of errors in rms units."""

    def __init__(self, noise: float) -> None:
        super().__init__()
        self.noise = noise
        self.count = 0
        self.curved = True  # if False, ReLUs have no second derivative, as usual

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _RELUS or func in _IN_PLACE:
            x = args[0] if args else kwargs["input"]
            writes = func in _IN_PLACE or kwargs.get("inplace") is True or (func is F.relu and args[1:] == (True,))
            if isinstance(x, Tensor) and x.requires_grad:
                self.count += 1
                result: Tensor = _SmoothRelu.apply(x.clone() if writes else x, self)  # type: ignore[no-untyped-call]
                return x.copy_(result) if writes else result
        return func(*args, **kwargs)


NOISE = 0.01
"""ReLUs are smoothed for errors of this relative size, about that of 8 bits; other sizes are scaled to it."""

Slopes = dict[str, Tensor]
"""The derivatives of u·g with respect to the places of one call."""


def gradient_variance(subject: Subject) -> Values:
    """The mean over batches; each needs one forward and two backward passes, and one more if there are ReLUs."""
    sums = subject.each(lambda name, spec: 0.0)
    generator = torch.Generator().manual_seed(subject.seed)
    with (
        training_batch_norms(subject.model),
        substitutable_operators(subject.model, subject.graph, subject.any_spec) as operators,
    ):
        for inputs, target in subject.batches:
            places = {name: CallRecorder(subject.op(name).kind) for name in subject.cases}
            operators.put(places)
            with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), SmoothRelus(NOISE) as relus:
                loss = subject.loss(call(subject.model, inputs), target)
            calls = [(name, seen) for name, one in places.items() for seen in one.calls]
            smooth, kinks = _slopes(loss, subject.model, [seen for _, seen in calls], relus, generator)
            for (name, seen), *slopes in zip(calls, smooth, kinks, strict=True):
                for format, spec in subject.cases[name].items():
                    sums[name][format] += _variance(seen, spec, *slopes) / len(subject.batches)
    return sums


def _slopes(
    loss: Tensor, model: nn.Module, calls: list[OperatorCall], relus: SmoothRelus, generator: torch.Generator
) -> tuple[list[Slopes], list[Slopes]]:
    """For each call, the derivatives without the kinks of ReLUs, and the contribution of the kinks."""
    parameters = trainable_parameters(model)
    gradients: Any = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
    signs = [torch.randint(0, 2, p.shape, generator=generator).to(p) * 2 - 1 for p in parameters]
    parts = [(g * u).sum() for g, u in zip(gradients, signs, strict=True) if g is not None]
    product = torch.stack(parts).sum()
    keys = [(index, place) for index, seen in enumerate(calls) for place, x in seen.places.items() if x.requires_grad]
    tensors = [calls[index].places[place] for index, place in keys]

    def again(curved: bool, retain: bool) -> list[Slopes]:
        relus.curved = curved
        found = torch.autograd.grad(product, tensors, retain_graph=retain, allow_unused=True)
        slopes: list[Slopes] = [{} for _ in calls]
        for (index, place), slope in zip(keys, found, strict=True):
            if slope is not None:
                slopes[index][place] = slope
        return slopes

    smooth = again(curved=False, retain=relus.count > 0)
    kinks: list[Slopes] = [{} for _ in calls]
    if relus.count:
        both = again(curved=True, retain=False)
        for one, with_kinks, without in zip(kinks, both, smooth, strict=True):
            for place, slope in with_kinks.items():
                one[place] = slope - without[place] if place in without else slope
    return smooth, kinks


def _variance(seen: OperatorCall, spec: ComputeSpec, smooth: Slopes, kinks: Slopes) -> float:
    """Flips of ReLUs grow with the size of errors, not with its square, so they are scaled to the kernel's error."""
    errors = list(rounding_errors(seen, spec))
    flips = sum(error.moves(kinks) for error in errors)
    relative = _relative(errors, seen) if flips else 0.0
    return sum(error.moves(smooth) for error in errors) + (flips * NOISE / sqrt(relative) if relative else 0.0)


def _relative(errors: list[RoundingError], seen: OperatorCall) -> float:
    """The squared relative error of the output: relative errors of factors add up."""
    numbers = {"left": seen.left, "right": seen.right, "out": seen.given["out"]}
    forward = [(error, numbers[error.places[0]]) for error in errors if error.places[0] in numbers]
    return sum(error.energy / max(float(x.square().sum(dtype=torch.float64)), 1e-300) for error, x in forward)


@dataclass(frozen=True)
class RoundingError:
    """One rounding: the variance of each element or, with a `channel` axis, the error itself.

    Errors of rounding to nearest can be correlated: all values that are small relative to the largest become 0. Errors
    within a channel therefore keep their signs. Channels, and all elements of a weight, are independent.
    """

    #: The places that use the rounded values.
    places: tuple[str, ...]
    sizes: Tensor
    channel: int | None = None

    @property
    def energy(self) -> float:
        """The sum of the variances."""
        sizes = self.sizes if self.channel is None else self.sizes.square()
        return float(sizes.sum(dtype=torch.float64))

    def moves(self, slopes: dict[str, Tensor]) -> float:
        """The variance of a quantity with these derivatives with respect to the places."""
        known = [slopes[place] for place in self.places if place in slopes]
        if not known:
            return 0.0
        slope = known[0] if len(known) == 1 else torch.stack(known).sum(0)
        if self.channel is None:
            return float((slope.square() * self.sizes).sum(dtype=torch.float64))
        moved = (slope * self.sizes).movedim(self.channel, 0).flatten(1).sum(1, dtype=torch.float64)
        return float(moved.square().sum())


KernelErrors = Callable[[OperatorCall, ComputeSpec], Iterator[RoundingError]]


def stochastic_variance(x: Tensor, *, signed: bool = False, limit: int = FULL, whole: bool = False) -> Tensor:
    """The variance of stochastically rounded codes."""
    step = encode(x, signed=signed, limit=limit, whole=whole).steps
    up = x / step
    up -= up.floor()
    return up * (1 - up) * step**2


def int8_errors(seen: OperatorCall, spec: ComputeSpec) -> Iterator[RoundingError]:
    """The errors of kernels/int8.py."""
    if seen.products.kind == "matmul":
        return _int8_matmul(seen, spec)
    if seen.products.kind == "embedding":
        return iter([RoundingError(("right",), _rows(seen.right, FULL, spec))])
    return _int8_weighted(seen, spec)


def _int8_weighted(seen: OperatorCall, spec: ComputeSpec) -> Iterator[RoundingError]:
    left, weight, grad, channel = seen.left, seen.right, seen.grad, seen.channel
    limit = second_limit(left.device)
    codes = encode(seen.rows(left), whole=spec.per_tensor)
    # the backward pass reuses the codes
    yield RoundingError(("left", "left_again"), codes.float().view(left.shape) - left, channel)
    yield RoundingError(("right",), _rows(weight, limit, spec))
    if grad is None:
        return
    for_left, for_right = "input" in spec.backward, "weight" in spec.backward
    if seen.products.shape:
        in_float = gradients_in_float(weight, *seen.products.shape)
        for_left = for_left and "input" not in in_float
        for_right = for_right and "weight" not in in_float
    if for_left:
        yield RoundingError(("right_again",), _turned(seen, limit, spec))
        yield _encoded(("grad_for_left",), seen, grad, spec, signed=True)
    if for_right:
        yield _for_weight(seen, grad, steps_of(codes), spec, limit)


def _for_weight(seen: OperatorCall, grad: Tensor, steps: Tensor, spec: ComputeSpec, limit: int) -> RoundingError:
    """The error of the gradient times the input's steps, with one scale, in units of the gradient."""
    rows = seen.rows(grad)
    units = torch.where(steps > 0, 1.0 / steps, 0.0)  # errors multiplied by zeros have no effect
    if spec.stochastic:
        variance = stochastic_variance(rows * steps, signed=True, limit=limit, whole=True) * units.square()
        return RoundingError(("grad_for_right",), variance.view(grad.shape))
    codes = encode(rows * steps, signed=True, limit=limit, whole=True)
    return RoundingError(("grad_for_right",), ((codes.float() - rows * steps) * units).view(grad.shape), seen.channel)


def _int8_matmul(seen: OperatorCall, spec: ComputeSpec) -> Iterator[RoundingError]:
    left, right, grad, channel = seen.left, seen.right, seen.grad, seen.channel
    limit = second_limit(left.device)
    yield RoundingError(
        ("left",), encode(seen.rows(left), whole=spec.per_tensor).float().view(left.shape) - left, channel
    )
    yield RoundingError(("right",), _columns(right, limit, spec))
    if grad is None:
        return
    if "input" in spec.backward:
        yield _encoded(("grad_for_left",), seen, grad, spec)
        yield RoundingError(("right_again",), _columns(right.transpose(-1, -2), limit, spec).transpose(-1, -2))
    if "weight" in spec.backward:
        turned = _encoded(("grad_for_right",), seen, grad.transpose(-1, -2), spec)
        yield replace(turned, sizes=turned.sizes.transpose(-1, -2))
        yield RoundingError(("left_again",), _columns(left, limit, spec))


def _encoded(
    places: tuple[str, ...], seen: OperatorCall, x: Tensor, spec: ComputeSpec, *, signed: bool = False
) -> RoundingError:
    rows = seen.rows(x)
    if spec.stochastic:
        return RoundingError(places, stochastic_variance(rows, signed=signed, whole=spec.per_tensor).view(x.shape))
    codes = encode(rows, signed=signed, whole=spec.per_tensor)
    return RoundingError(places, (codes.float() - rows).view(x.shape), seen.channel)


def _rows(x: Tensor, limit: int, spec: ComputeSpec) -> Tensor:
    """Squared errors with one scale per row."""
    return (encode_rows(x, limit, whole=spec.per_tensor).float() - x).square_()


def _columns(x: Tensor, limit: int, spec: ComputeSpec) -> Tensor:
    """Squared errors with one scale per column of each matrix."""
    rows = x.transpose(-1, -2)
    return _rows(rows.reshape(-1, x.shape[-2]), limit, spec).view(rows.shape).transpose(-1, -2)


def _turned(seen: OperatorCall, limit: int, spec: ComputeSpec) -> Tensor:
    """Squared errors of a weight with rows per input channel, which has other scales in the backward pass."""
    weight = seen.right
    if not seen.products.shape:
        return _rows(weight.t(), limit, spec).t()
    groups, wide = seen.products.shape[3], weight if weight.dim() == 4 else weight[:, :, None]
    numbers = torch.arange(wide.numel(), device=wide.device).view(wide.shape)
    back = turn(numbers, groups).reshape(-1).argsort()
    return _rows(turn(wide, groups), limit, spec).reshape(-1)[back].view(weight.shape)


def cast_errors(dtype: torch.dtype) -> KernelErrors:
    """The errors of kernels/lowfloat.py, which casts inputs and outputs."""

    def error(places: tuple[str, ...], x: Tensor, channel: int | None) -> RoundingError:
        sizes = x.to(dtype).to(x.dtype) - x
        return RoundingError(places, sizes.square_() if channel is None else sizes, channel)

    def errors(seen: OperatorCall, spec: ComputeSpec) -> Iterator[RoundingError]:
        weight = None if seen.products.kind != "matmul" else seen.channel
        yield error(("right", "right_again"), seen.right, weight)
        if seen.left.is_floating_point():
            yield error(("left", "left_again"), seen.left, seen.channel)
            yield error(("out",), seen.given["out"], seen.channel)
        if seen.grad is not None:
            yield error(("grad_for_left", "grad_for_right"), seen.grad, seen.channel)
        if "to_left" in seen.given:
            yield error(("to_left",), seen.given["to_left"], seen.channel)
        if "to_right" in seen.given and seen.products.kind != "embedding":  # embeddings sum in float32
            yield error(("to_right",), seen.given["to_right"], weight)

    return errors


def measured_errors(seen: OperatorCall, spec: ComputeSpec) -> Iterator[RoundingError]:
    """The errors of any kernel, measured by running it on these values."""
    operands = [x.clone().requires_grad_(x.is_floating_point()) for x in (seen.left, seen.right)]
    shape = (None, *seen.products.shape) if seen.products.shape else ()
    with torch.enable_grad():
        out = KERNELS.get(spec.format)(spec, simulate=True)(seen.func, (*operands, *shape), {})
    yield RoundingError(("out",), out.detach() - seen.given["out"], seen.channel)
    wanted = [
        (place, x)
        for place, x in zip(("to_left", "to_right"), operands, strict=True)
        if x.requires_grad and place in seen.given
    ]
    if seen.grad is not None and wanted:
        found = torch.autograd.grad(out, [x for _, x in wanted], seen.grad)
        for (place, _), given in zip(wanted, found, strict=True):
            matrix = place == "to_right" and seen.products.kind != "matmul"
            yield RoundingError((place,), given - seen.given[place], 0 if matrix else seen.channel)


def rounding_errors(seen: OperatorCall, spec: ComputeSpec) -> Iterator[RoundingError]:
    """The errors of this kernel: per place for Bitwright's own kernels, measured at the results for others."""
    return _KNOWN.get(spec.format, measured_errors)(seen, spec)


_KNOWN: dict[str, KernelErrors] = {
    "int8": int8_errors,
    "bf16": cast_errors(torch.bfloat16),
    "fp16": cast_errors(torch.float16),
}
