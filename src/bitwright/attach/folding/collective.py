"""A sum over processes that gradients pass, as one operator that compilers keep whole.

`torch.distributed.nn.functional.all_reduce` does the same, but torch.compile can't trace it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# A process group is no argument of an operator, its name is. "" is the default group.
_GROUPS: dict[str, Any] = {}


def remember_group(norm: nn.Module) -> None:
    """Make the group of a norm that has one of its own known by name."""
    group: Any = getattr(norm, "process_group", None)
    if group is not None:
        _GROUPS[group.group_name] = group


def syncs(norm: nn.Module) -> bool:
    """Whether there are other processes to share statistics with."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(_group(norm)) > 1


def over_ranks(norm: nn.Module, x: Tensor) -> Tensor:
    """The sum of `x` over the processes of the norm's group."""
    group = _group(norm)
    total: Tensor = sum_over_ranks(x, "" if group is None else group.group_name)
    return total


def _group(norm: nn.Module) -> Any:
    # asked at each call: a process group can be neither copied nor saved with the model
    return getattr(norm, "process_group", None)


@torch.library.custom_op("bitwright::sum_over_ranks", mutates_args=())
def sum_over_ranks(x: Tensor, group: str) -> Tensor:
    """The sum of `x` over the processes of the group of that name."""
    total = x.contiguous().clone()
    dist.all_reduce(total, group=_GROUPS[group] if group else None)
    return total


@sum_over_ranks.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return torch.empty_like(x)


def _keep_group(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.group = inputs[1]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    # every rank's loss depends on every rank's part
    return sum_over_ranks(grad, ctx.group), None


sum_over_ranks.register_autograd(_backward, setup_context=_keep_group)
