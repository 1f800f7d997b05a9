"""Process groups: join and leave them, the ranks, and how they share a model (DDP or FSDP2).

With torch 2.13, a `DistributedDataParallel` that dies after `destroy_process_group()` can block its process forever:

1. A worker thread of gloo finishes an all-reduce. Its caller continues at once, while the thread still
   holds the finished work. The work stores the thread-local state of its caller, Python objects included.
2. Python frees the DDP. Its `Reducer` (C++) holds the last reference to the group, and pybind11 destroys a `Reducer`
   with the GIL held. The group's destructor joins gloo's threads.
3. The worker thread frees the work, needs the GIL for the stored Python object, and waits for step 2.

The Python object of a `ProcessGroup` is safe: its destructor releases the GIL first. So the rule is that a Python
reference to the group must outlive every `Reducer` of it. `keep_group` and `leave_group` enforce the rule.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from bitwright.core.errors import BitwrightError, Problem, TrainError, problem_data
from bitwright.quantizers import find_attachment

_KEPT: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""The group of each reducer. pybind11 calls weak references to an object after it has destroyed the C++ object, so a
group is released after its reducer."""


def keep_group(net: Any) -> None:
    """Keep a DDP's process group alive until the DDP's reducer is destroyed."""
    for part in (net.reducer, net.logger):  # the logger shares the reducer
        if part is not None:
            _KEPT[part] = net.process_group


def keep_groups() -> None:
    """`keep_group` for every DDP object in this process."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    # isinstance() would be slow (DDP has an abstract base class), and some proxies of torch warn about it
    for found in [one for one in gc.get_objects() if DistributedDataParallel in type(one).__mro__]:
        if "reducer" in vars(found):  # else its __init__ has failed
            keep_group(found)


def leave_group() -> None:
    """Destroy the default process group; any `DistributedDataParallel` may outlive it safely."""
    if dist.is_available() and dist.is_initialized():
        keep_groups()
        dist.destroy_process_group()


@contextmanager
def joined_group(backend: str, **options: Any) -> Iterator[None]:
    """Call `init_process_group(backend, **options)`, and leave the group at the end."""
    dist.init_process_group(backend, **options)
    try:
        yield
    finally:
        leave_group()


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The position of this process among all training processes."""

    rank: int = 0
    world: int = 1
    local: int = 0  # rank within this host, which determines the accelerator

    @property
    def first(self) -> bool:
        """Whether this process writes files and logs."""
        return self.rank == 0

    @property
    def several(self) -> bool:
        """Whether there are other processes."""
        return self.world > 1

    def tell(self, value: Any) -> Any:
        """Send rank 0's value (any JSON value) to all ranks."""
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

    def share(self, values: list[float]) -> list[list[float]]:
        """Every rank's numbers, on all ranks; the lists have equal lengths. One small message."""
        if not self.several:
            return [values]
        mine = torch.tensor(values, dtype=torch.float64, device=group_device())
        found = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(found, mine)
        return [row.tolist() for row in found]

    def from_first(self, compute: Callable[[], Any]) -> Any:
        """Compute a JSON value on rank 0 for all ranks; its error is raised on all ranks, so that none waits."""
        value, problems = None, None
        if self.first:
            try:
                value = compute()
            except BitwrightError as error:
                problems = [problem_data(problem) for problem in error.problems]
        value, problems = self.tell([value, problems])
        if problems:
            raise TrainError([Problem(**problem) for problem in problems])
        return value

    def agree(self, model: nn.Module) -> None:
        """Raise an error if the weights or quantizer state of ranks differ."""
        if not self.several:
            return
        digests: list[Any] = [None] * self.world
        dist.all_gather_object(digests, _digests(model))
        wrong = [key for key, value in digests[0].items() if any(other.get(key) != value for other in digests[1:])]
        if wrong:
            raise TrainError.single(
                "ranks have different parameter values",
                where=wrong[0] + (f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""),
                fix="change parameters only with the optimizer, and equally on all ranks",
                code="ranks-differ",
            )


def group_device() -> torch.device:
    """The device of small messages in the current group: nccl only sends from GPUs."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def _digests(model: nn.Module) -> dict[str, str]:
    """Hashes of parameters and quantizer buffers; the statistics of norms may differ until the next forward.

    Shards are skipped, because they always differ. Tensors are copied first: FSDP2 must resize their memory, which
    isn't possible after NumPy has accessed it.
    """
    kept = {**dict(model.named_parameters()), **{n: b for n, b in model.named_buffers() if n.startswith("bitwright.")}}
    return {
        name: hashlib.sha256(tensor.detach().cpu().clone().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in kept.items()
        if not hasattr(tensor, "full_tensor")
    }


def current_ranks() -> Ranks:
    """The rank of this process in the current process group, if there is one."""
    if not (dist.is_available() and dist.is_initialized()):
        return Ranks()
    return Ranks(rank=dist.get_rank(), world=dist.get_world_size(), local=int(os.environ.get("LOCAL_RANK", "0")))


@contextmanager
def process_group(device: str | None = None) -> Iterator[Ranks]:
    """Use the current process group, or join torchrun's and leave it at the end, or use only this process.

    `device` is the device of the model, if known: NCCL can't send tensors from CPUs.
    """
    if not dist.is_available():
        yield Ranks()
        return
    made = not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1
    if made:
        _join(device)
    try:
        yield current_ranks()
    finally:
        if made:
            leave_group()


def device_of(said: str | None, local: int) -> torch.device:
    """The device of this process: the given one, or by default its own GPU if there is one.

    >>> device_of("cpu", 1), device_of("cuda", 1), device_of("cuda:0", 1)
    (device(type='cpu'), device(type='cuda', index=1), device(type='cuda', index=0))
    """
    found = torch.device(said or ("cuda" if torch.cuda.is_available() else "cpu"))
    return torch.device("cuda", local) if str(found) == "cuda" else found


def _join(device: str | None) -> None:
    """Join torchrun's group, with a new prefix after each restart.

    torchrun's store survives a restart (torch 2.13). Without the prefix, a restarted process could find the address of
    a dead process there and wait for it forever.
    """
    store, rank, world = next(iter(rendezvous("env://")))
    attempt = agree_on_attempt(store, rank, world)
    backend = "gloo"
    if torch.cuda.is_available() and torch.device(device or "cuda").type == "cuda":
        backend = "nccl"
        # NCCL sends objects through the current GPU; without this call all ranks would use the first one
        torch.cuda.set_device(device_of(device, int(os.environ.get("LOCAL_RANK", "0"))))
    fresh = PrefixStore(f"bitwright/{attempt}", store)
    dist.init_process_group(backend, store=fresh, rank=rank, world_size=world)


_POLL = 0.02  # seconds


def agree_on_attempt(store: Any, rank: int, world: int, *, seconds: float = 600.0) -> str:
    """Return a name that only the processes of this attempt have, although the store has entries of earlier ones.

    The number of restarts is no such name: it doesn't change when a machine joins, and machines that join later count
    from zero. Rank 0 chooses a name and sends it to each process that presents itself, until the process confirms. A
    dead process that presented itself earlier can't confirm.
    """
    own = uuid.uuid4().hex
    until = time.monotonic() + seconds
    if rank > 0:
        store.set(f"bitwright/rank/{rank}", own)
        store.wait([f"bitwright/name/{own}"], timedelta(seconds=seconds))
        name = str(store.get(f"bitwright/name/{own}").decode())
        store.set(f"bitwright/confirmed/{own}/{name}", "")
        return name
    answered: dict[int, str] = {}
    missing = set(range(1, world))
    while missing:
        for other in sorted(missing):
            if not store.check([f"bitwright/rank/{other}"]):
                continue
            process = store.get(f"bitwright/rank/{other}").decode()
            if answered.get(other) != process:
                answered[other] = process
                store.set(f"bitwright/name/{process}", own)
            elif store.check([f"bitwright/confirmed/{process}/{own}"]):
                missing.discard(other)
        if missing and time.monotonic() > until:
            ranks, fix = ", ".join(map(str, sorted(missing))), "look at the output of these processes"
            raise TrainError.single(
                "other ranks didn't start", where="rank", value=ranks, fix=fix, code="ranks-missing"
            )
        time.sleep(_POLL if missing else 0)
    return own


class SingleProcess:
    """Training in one process. Subclasses override what processes must do together."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.net = model

    evaluates_together = False
    """Whether every rank must take part in a forward pass of the model."""

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        """Don't synchronize gradients of a batch that isn't the last of its step."""
        return nullcontext()

    def begin_step(self) -> None:
        """Called before the first forward pass of a step."""

    def end_backward(self) -> None:
        """Called after the last backward pass of a step."""

    def clip(self, largest: float) -> Tensor:
        """Clip all gradients together and return their norm."""
        return nn.utils.clip_grad_norm_(self.model.parameters(), largest)

    def whole(self, tensor: Tensor) -> Tensor:
        """The unsharded tensor; all ranks must call this method."""
        return tensor

    def part(self, whole: Tensor, like: Tensor) -> Tensor:
        """This rank's shard of a tensor, sharded like `like`."""
        return whole

    def stopping(self, asked: bool) -> bool:
        """Whether to stop after this step because a rank was asked to."""
        return asked


class Replicated(SingleProcess):
    """DistributedDataParallel: each rank has the whole model; gradients are averaged, buffers come from rank 0."""

    def __init__(self, model: nn.Module, net: DistributedDataParallel) -> None:
        super().__init__(model)
        self.net: Any = net

    @staticmethod
    def replicate(model: nn.Module, device: torch.device) -> Replicated:
        """Wrap the model in DDP."""
        ids = [device.index] if device.type == "cuda" else None
        net = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
        keep_group(net)
        return Replicated(model, net)

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        """Use DDP's `no_sync`."""
        return nullcontext() if last else self.net.no_sync()

    def stopping(self, asked: bool) -> bool:
        """Stop on all ranks after the same step: the others would wait for the gradients of a rank that ended."""
        return _any_rank(asked, next(self.model.parameters()).device)


class Sharded(SingleProcess):
    """FSDP2: each rank has a shard of every weight. Quantizer state is too small to shard, so it is replicated.

    FSDP2 rejects scalars such as per-tensor scales. They are excluded, and one collective averages their gradients.
    """

    evaluates_together = True

    def __init__(self, model: nn.Module, device: torch.device, ranks: Ranks) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        super().__init__(model)
        self.ranks, self.device = ranks, device
        attachment = find_attachment(model)
        quantizers = attachment.quantizers.values() if attachment is not None else ()
        self.own = list({p: None for q in quantizers for p in q.parameters() if p.requires_grad})
        mesh = init_device_mesh(device.type, (ranks.world,))
        fully_shard(model, mesh=mesh, ignored_params=set(self.own))

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        """Use FSDP2's `set_requires_gradient_sync`."""
        sharded: Any = self.model
        sharded.set_requires_gradient_sync(last)
        return nullcontext()

    @torch.no_grad()
    def begin_step(self) -> None:
        """Use the buffers of rank 0, as DDP does."""
        share_buffers(self.model)

    @torch.no_grad()
    def end_backward(self) -> None:
        """Average the gradients of parameters excluded from FSDP2."""
        gradients = [p.grad for p in self.own if p.grad is not None]
        if not gradients:
            return
        flat = torch.cat([g.reshape(-1) for g in gradients])
        dist.all_reduce(flat)
        flat /= self.ranks.world
        for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))

    @torch.no_grad()
    def clip(self, largest: float) -> Tensor:
        """Clip gradients; torch's function doesn't support a mix of sharded and replicated ones."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norms = [self.whole(torch.linalg.vector_norm(gradient)) for gradient in gradients]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        factor = torch.clamp(largest / (norm + 1e-6), max=1.0)
        for gradient in gradients:
            gradient.mul_(factor)
        return norm

    def whole(self, tensor: Tensor) -> Tensor:
        """Gather all shards."""
        full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        return full

    def part(self, whole: Tensor, like: Tensor) -> Tensor:
        """Shard the tensor like `like`."""
        from torch.distributed.tensor import DTensor, distribute_tensor

        if not isinstance(like, DTensor) or whole.dim() == 0:
            return whole
        cut: Tensor = distribute_tensor(whole, like.device_mesh, like.placements)
        return cut

    def stopping(self, asked: bool) -> bool:
        """Stop on all ranks or on none, because saving a checkpoint needs all of them."""
        return _any_rank(asked, self.device)


def _any_rank(value: bool, device: torch.device) -> bool:
    flag = torch.tensor(float(value), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


@torch.no_grad()
def share_buffers(model: nn.Module) -> None:
    """Copy the buffers of rank 0 to all ranks, with one message per dtype."""
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for buffer in model.buffers():
        kinds.setdefault(buffer.dtype, []).append(buffer)
    for buffers in kinds.values():
        flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
        dist.broadcast(flat, src=0)
        for buffer, values in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
            buffer.copy_(values.view_as(buffer))
