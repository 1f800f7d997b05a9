"""`errors_without(…)`: what the outputs are like when some quantizers are switched off."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bitwright.attach import attachment_of, in_mode
from bitwright.modes import evaluating
from bitwright.workload import call


@torch.no_grad()
def errors_without(
    model: nn.Module, batches: Sequence[Any], variants: Mapping[str, Collection[str]]
) -> dict[str, float]:
    """For each variant, a set of sites that are switched off, ‖y − ŷ‖/‖y‖ of the outputs of a prepared model."""
    quantizers = attachment_of(model).quantizers
    with evaluating(model):
        with in_mode(model, "float"):
            wanted = [_outputs(model, batch) for batch in batches]
        with in_mode(model, "quantize"):
            try:
                errors = {}
                for name, off in variants.items():
                    for site, quantizer in quantizers.items():
                        # a bias has the scale of its input and weight: it goes with either
                        quantizer.enabled = site not in off and not any(source in off for source in quantizer.of)
                    errors[name] = _error(wanted, [_outputs(model, batch) for batch in batches])
                return errors
            finally:
                for quantizer in quantizers.values():
                    quantizer.enabled = True


def _error(wanted: list[list[Tensor]], got: list[list[Tensor]]) -> float:
    error = signal = 0.0
    for reference, outputs in zip(wanted, got, strict=True):
        for one, other in zip(reference, outputs, strict=True):
            error += float((one.double() - other.double()).square().sum())
            signal += float(one.double().square().sum())
    return sqrt(error / signal) if signal else 0.0


def _outputs(model: nn.Module, batch: Any) -> list[Tensor]:
    return [x for x in tree_leaves(call(model, batch)) if isinstance(x, Tensor) and x.is_floating_point()]
