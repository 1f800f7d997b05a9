"""output-error: run one operator at a time with its kernel and measure the error of the model's outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from bitwright.core.registry import KERNELS
from bitwright.core.tensor_tree import eval_mode
from bitwright.plan import ComputeSpec
from bitwright.sensitivity.error_injection import substitutable_operators
from bitwright.sensitivity.operator_scores import Subject, Values
from bitwright.workload import call


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
