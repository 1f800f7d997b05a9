"""Indicators: different measures of an operator's sensitivity to low precision.

`hessian` estimates the trace of the loss's Hessian, and `output-error` measures the error of the model's outputs.
`weight-variance` and `random` are baselines. The indicator `gradient-variance` has its own file.

Hutchinson's estimate: for a random vector v of signs, E[vᵀHv] is the trace of H. The product Hv is the gradient of
(gradient · v), so the Hessian itself is never computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bitwright.core.errors import CalibrationError
from bitwright.core.registry import KERNELS
from bitwright.core.tensor_tree import eval_mode
from bitwright.plan import ComputeSpec
from bitwright.sensitivity.error_injection import rounded_weight, substitutable_operators, weight_name, weight_of
from bitwright.sensitivity.operator_scores import Subject, Values
from bitwright.workload import call


def hessian_traces(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Callable[[Any, Any], Tensor],
    parameters: Iterable[str],
    *,
    vectors: int = 8,
    seed: int = 0,
) -> dict[str, float]:
    """The trace for each of these parameters of a float model, averaged over batches of (inputs, target)."""
    known = dict(model.named_parameters(remove_duplicate=False))
    chosen = {name: known[name] for name in parameters}
    sums = dict.fromkeys(chosen, 0.0)
    generator = torch.Generator().manual_seed(seed)
    asked = {name: parameter.requires_grad for name, parameter in chosen.items()}
    count = 0
    try:
        for parameter in chosen.values():
            parameter.requires_grad_(True)
        with eval_mode(model), torch.enable_grad():
            for inputs, target in batches:
                count += 1
                value = loss(call(model, inputs), target)
                gradients = torch.autograd.grad(value, list(chosen.values()), create_graph=True, allow_unused=True)
                for _ in range(vectors):
                    _add(sums, chosen, gradients, generator, vectors)
    finally:
        for name, parameter in chosen.items():
            parameter.requires_grad_(asked[name])
    if not count:
        raise CalibrationError(
            "no batch to compute scores with", fix="pass a loader with at least one batch", code="no-batches"
        )
    return {name: value / count for name, value in sums.items()}


def _add(
    sums: dict[str, float],
    chosen: dict[str, nn.Parameter],
    gradients: tuple[Tensor | None, ...],
    generator: torch.Generator,
    vectors: int,
) -> None:
    """Add one random vector; the contributions of other parameters' blocks average to zero."""
    signs = [torch.randint(0, 2, p.shape, generator=generator).to(p) * 2 - 1 for p in chosen.values()]
    product = sum(((g * v).sum() for g, v in zip(gradients, signs, strict=True) if g is not None), torch.zeros(()))
    if not product.requires_grad:
        return  # the loss is linear in every weight
    curved = torch.autograd.grad(product, list(chosen.values()), retain_graph=True, allow_unused=True)
    for name, sign, column in zip(chosen, signs, curved, strict=True):
        if column is not None:
            sums[name] += float((column * sign).sum()) / vectors


def hessian(subject: Subject) -> Values:
    """(trace(H)/n)·‖ΔW‖², twice the expected increase of the loss; 0 for operators without a weight."""
    names = {name: weight_name(subject.op(name)) for name in subject.cases}
    wanted = dict.fromkeys(name for name in names.values() if name is not None)
    traces = hessian_traces(subject.model, subject.batches, subject.loss, wanted, seed=subject.seed) if wanted else {}

    def added(name: str, spec: ComputeSpec) -> float:
        weight, parameter = weight_of(subject.model, subject.op(name)), names[name]
        if weight is None or parameter is None:
            return 0.0
        error = float((rounded_weight(weight, subject.op(name).kind, spec) - weight).square().sum())
        return max(traces[parameter], 0.0) / weight.numel() * error

    return subject.each(added)


def output_error(subject: Subject) -> Values:
    """‖y − ŷ‖²/‖y‖² of the outputs; one forward pass per operator, format and batch, with simulated kernels."""
    with (
        torch.no_grad(),
        eval_mode(subject.model),
        substitutable_operators(subject.model, subject.graph, subject.any_spec) as operators,
    ):

        def outputs(kernels: Mapping[str, Any]) -> list[Tensor]:
            operators.put(kernels)
            leaves = [x for inputs, _ in subject.batches for x in tree_leaves(call(subject.model, inputs))]
            return [x.double() for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]

        wanted = outputs({})
        signal = sum(float(x.square().sum()) for x in wanted)

        def error(name: str, spec: ComputeSpec) -> float:
            got = outputs({name: KERNELS.get(spec.format)(spec, simulate=True)})
            return sum(float((a - b).square().sum()) for a, b in zip(wanted, got, strict=True)) / max(signal, 1e-30)

        return subject.each(error)


def random(subject: Subject) -> Values:
    """A number between 0 and 1 that depends only on the seed, the operator and the format."""
    return subject.each(lambda name, spec: Random(f"{subject.seed} {name} {spec}").random())


def weight_variance(subject: Subject) -> Values:
    """|var(Ŵ) − var(W)|; 0 for operators without a weight. Uses no data."""

    def change(name: str, spec: ComputeSpec) -> float:
        weight = weight_of(subject.model, subject.op(name))
        if weight is None:
            return 0.0
        rounded = rounded_weight(weight, subject.op(name).kind, spec)
        return abs(float(rounded.double().var(correction=0) - weight.double().var(correction=0)))

    return subject.each(change)
