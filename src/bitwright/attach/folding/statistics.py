"""Batch statistics as a norm takes them, over one process or all, with gradients; and running ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bitwright.attach.folding.collective import over_ranks, syncs
from bitwright.attach.folding.fold import wide
from bitwright.errors import BitwrightError


def batch_statistics(norm: nn.Module, x: Tensor, *, sync: bool) -> tuple[Tensor, Tensor, Tensor | int]:
    """Mean, biased variance and count per channel (axis 1) of this step's batch."""
    axes = [axis for axis in range(x.dim()) if axis != 1]
    count = x.numel() // x.shape[1]
    if sync and syncs(norm):
        return _over_processes(norm, wide(x), axes, count)
    if count == 1:
        raise BitwrightError(
            "batch statistics need more than one value per channel",
            value=list(x.shape),
            fix="use a larger batch, or put this norm into eval mode",
        )
    variance, mean = torch.var_mean(wide(x), axes, correction=0)
    return mean, variance, count


def _over_processes(norm: nn.Module, x: Tensor, axes: list[int], count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The statistics of the joint batch; ranks may have batches of unequal size.

    Sums first, then squares around the joint mean: E[x²] − E[x]² would cancel in float32.
    """
    own = torch.cat([x.sum(axes), x.new_full((1,), float(count))])
    total = over_ranks(norm, own)
    joint = total[-1].detach()
    mean = total[:-1] / joint
    shape = [-1] + [1] * (x.dim() - 2)
    squares = (x - mean.reshape(shape)).square().sum(axes)
    variance = over_ranks(norm, squares) / joint
    return mean, variance, joint


def update_running(norm: Any, mean: Tensor, variance: Tensor, count: Tensor | int, *, counted: bool) -> None:
    """Take a batch into the running statistics, as the norm itself would have done.

    `counted`: whether this batch is in `num_batches_tracked` already, which the norm's own forward sees to.
    """
    momentum = norm.momentum
    if momentum is None:  # the average of all batches
        momentum = 1.0 / (norm.num_batches_tracked.double() + (0 if counted else 1))
    unbiased = variance.detach() * (count / (count - 1))
    with torch.no_grad():
        for running, new in ((norm.running_mean, mean.detach()), (norm.running_var, unbiased)):
            running.copy_((1 - momentum) * running + momentum * new.to(running.dtype))
