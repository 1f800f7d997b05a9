"""One of two ranks whose DDP outlives the process group while one of gloo's threads still holds a finished work.

The last argument says how the group is left: "torch" alone deadlocks (see `bitwright.training.distributed`),
"leave_group" and "keep_group" must not. Rank 1 joins the last collective late, so that the order of events always is
the one that deadlocks.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from bitwright.training.distributed import keep_group, leave_group


class Mode(TorchFunctionMode):
    """A work stores the modes of the thread that started it."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def forget_work() -> None:
    """Start a collective; nobody but gloo's thread keeps the work and the mode."""
    with Mode():
        dist.all_reduce(torch.zeros(4), async_op=True)


def main(rank: int, address: str, leave: str) -> None:
    for number in range(2):  # torch keeps the first group of a process
        once(rank, f"{address}{number}", leave)
        sys.stdout.write(f"rank {rank} left\n")


def once(rank: int, address: str, leave: str) -> None:
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2, timeout=timedelta(seconds=30))
    net = DistributedDataParallel(nn.Linear(4, 4))
    net(torch.ones(2, 4)).sum().backward()
    if rank == 1:
        time.sleep(1.0)
        dist.all_reduce(torch.zeros(4))
    else:
        forget_work()
    if leave == "leave_group":
        leave_group()
    else:
        if leave == "keep_group":
            keep_group(net)
        dist.destroy_process_group()
    del net


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
