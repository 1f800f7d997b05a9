"""Call a workload's loss for training, profiling and scoring."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bitwright.core.errors import WorkloadError, defined_at, user_code
from bitwright.workload.data import shape_of
from bitwright.workload.workload import Loss, Workload

_EXPECTED = "loss(output, target) returns a tensor with one element"


def loss_of(workload: Workload) -> Loss:
    """The workload's loss, with clear errors for exceptions and invalid results.

    It keeps the name of the loss because profiles identify it by name.
    """
    loss = workload.loss
    assert loss is not None
    where = f"workload {workload.name!r}"

    @functools.wraps(loss, assigned=("__name__", "__doc__", "reduction"), updated=())
    def guarded(output: Any, target: Any) -> Tensor:
        try:
            value: Any = loss(output, target)
        except Exception:
            got = f"output: {shape_of(output)}; target: {shape_of(target)}"
            fix = f"call loss(model(inputs), target) in Python ({got})"
            with user_code(workload.name, "loss", expected=_EXPECTED, fix=fix):
                raise
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise WorkloadError(
                f"loss returned an invalid value{defined_at(loss)}; expected: {_EXPECTED}",
                where=where,
                value=shape_of(value),
                fix="return the mean over samples" if isinstance(value, Tensor) else "return a tensor, without .item()",
                code="invalid-loss",
            )
        if torch.is_grad_enabled() and not value.requires_grad:
            raise _no_gradient(loss, output, value, where)
        found: Tensor = value
        return found

    guarded.__qualname__ = getattr(loss, "__qualname__", type(loss).__name__)
    return guarded


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The trainable parameters. A model without any raises an error."""
    found = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not found:
        raise WorkloadError(
            "the model has no trainable parameters",
            value=type(model).__name__,
            fix="call requires_grad_(True) on the parameters to train",
            code="nothing-to-train",
        )
    return found


def _no_gradient(loss: object, output: Any, value: Tensor, where: str) -> WorkloadError:
    if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(output)):
        return WorkloadError(
            f"loss has no gradient{defined_at(loss)}; expected: {_EXPECTED} that depends on the output",
            where=where,
            value=f"{shape_of(value)} of {str(value.dtype).removeprefix('torch.')}",
            fix="compute it from the output without .item(), .detach(), argmax or comparisons",
            code="no-gradient",
        )
    return WorkloadError(
        "the model's output has no gradient, so it can't be trained",
        where=where,
        value=shape_of(output),
        fix="call requires_grad_(True) on the parameters to train; avoid torch.no_grad() and .detach() in forward",
        code="no-gradient",
    )
