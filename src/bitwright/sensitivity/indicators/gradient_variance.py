"""gradient-variance: the variance that low precision in one operator adds to the gradients of the whole model.

To first order, rounding errors ε at the places of an operator (error_injection.py) change the gradients g by J·ε, where
J is the derivative of g with respect to the places. Errors are independent, so E‖J·ε‖² = Σᵢ ‖Jᵢ‖²·var(εᵢ). For a vector
u of random signs, E(uᵀJ)ᵢ² = ‖Jᵢ‖², and uᵀJ is the derivative of the single number u·g. A second backward pass computes
it for all places of all operators at once. The method makes no assumption about the model between the operators.
docs/indicators.md contains the derivation.
"""

from __future__ import annotations

from math import pi, sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from bitwright.plan import ComputeSpec
from bitwright.sensitivity.error_injection import (
    CallRecorder,
    OperatorCall,
    substitutable_operators,
    training_batch_norms,
)
from bitwright.sensitivity.kernel_errors import RoundingError, rounding_errors
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
