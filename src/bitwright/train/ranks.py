"""Who else trains: ranks from the process group, and the few words that they exchange."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from bitwright.errors import TrainError
from bitwright.process_group import leave_group


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among all that train the model."""

    rank: int = 0
    world: int = 1
    local: int = 0  # among those of this host: which accelerator it takes

    @property
    def first(self) -> bool:
        """Whether this process writes files and speaks."""
        return self.rank == 0

    @property
    def several(self) -> bool:
        """Whether there are others."""
        return self.world > 1

    def tell(self, value: Any) -> Any:
        """Rank 0's value (anything that JSON can hold), on all ranks."""
        if not self.several:
            return value
        box = [json.dumps(value) if self.first else None]
        dist.broadcast_object_list(box, src=0)
        return json.loads(str(box[0]))

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on all ranks."""
        values: list[Any] = [value] * self.world
        if self.several:
            dist.all_gather_object(values, value)
        return values

    def agree(self, model: nn.Module) -> None:
        """Raise if ranks have different quantizer state or weights: replicas that drift apart train nonsense."""
        if not self.several:
            return
        digests: list[Any] = [None] * self.world
        dist.all_gather_object(digests, _digests(model))
        wrong = [key for key, value in digests[0].items() if any(other.get(key) != value for other in digests[1:])]
        if wrong:
            raise TrainError.single(
                "ranks have different numbers",
                where=wrong[0] + (f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""),
                fix="change parameters only through the optimizer, on all ranks alike",
            )


def _digests(model: nn.Module) -> dict[str, str]:
    """Of each parameter and of quantizer buffers; norms keep statistics of their own until the next forward.

    Shards are different by nature. Of copies: memory that NumPy has seen can't be resized any more, as FSDP2 must.
    """
    kept = {**dict(model.named_parameters()), **{n: b for n, b in model.named_buffers() if n.startswith("bitwright.")}}
    return {
        name: hashlib.sha256(tensor.detach().cpu().clone().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in kept.items()
        if not hasattr(tensor, "full_tensor")
    }


def here() -> Ranks:
    """This process among those of the process group, if there is one."""
    if not (dist.is_available() and dist.is_initialized()):
        return Ranks()
    return Ranks(rank=dist.get_rank(), world=dist.get_world_size(), local=int(os.environ.get("LOCAL_RANK", "0")))


@contextmanager
def joined(device: str | None = None) -> Iterator[Ranks]:
    """The process group that there is, or torchrun's (which is left again), or nobody but this process.

    `device` is where the model will be, if that is known: what is on CPUs can't be sent by what connects GPUs.
    """
    if not dist.is_available():
        yield Ranks()
        return
    made = not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1
    if made:
        _join(device)
    try:
        yield here()
    finally:
        if made:
            leave_group()


def device_of(said: str | None, local: int) -> torch.device:
    """Where this process trains: as it was said, else its own GPU, if there is one.

    >>> device_of("cpu", 1), device_of("cuda", 1), device_of("cuda:0", 1)
    (device(type='cpu'), device(type='cuda', index=1), device(type='cuda', index=0))
    """
    found = torch.device(said or ("cuda" if torch.cuda.is_available() else "cpu"))
    return torch.device("cuda", local) if str(found) == "cuda" else found


def _join(device: str | None) -> None:
    """Join torchrun's group, at each restart under another name.

    torchrun's store outlives a restart (torch 2.13): a process that comes back early would find the address of a dead
    one there, and wait for it in vain.
    """
    store, rank, world = next(iter(rendezvous("env://")))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    backend = "gloo"
    if torch.cuda.is_available() and torch.device(device or "cuda").type == "cuda":
        backend = "nccl"
        # it takes the process's current GPU for whatever has none, words too: without this all would take the first
        torch.cuda.set_device(device_of(device, int(os.environ.get("LOCAL_RANK", "0"))))
    fresh = PrefixStore(f"bitwright/{attempt}", store)
    dist.init_process_group(backend, store=fresh, rank=rank, world_size=world)
