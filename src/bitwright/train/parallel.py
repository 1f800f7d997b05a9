"""How processes share a model: one alone, replicas (DDP), or shards (FSDP2)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bitwright.attach import find_attachment
from bitwright.process_group import keep_group
from bitwright.train.ranks import Ranks


class Alone:
    """One process. The others change what processes must do together."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.net = model

    measures_together = False
    """Whether every rank must take part in a forward of the model."""

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        """Gradients of a batch that isn't the step's last stay where they are."""
        return nullcontext()

    def begin_step(self) -> None:
        """Before the first forward of a step."""

    def end_backward(self) -> None:
        """After the last backward of a step."""

    def clip(self, largest: float) -> Tensor:
        """Shorten all gradients together; gives their norm."""
        return nn.utils.clip_grad_norm_(self.model.parameters(), largest)

    def whole(self, tensor: Tensor) -> Tensor:
        """A tensor of this rank as one process would have it; all ranks must ask."""
        return tensor

    def part(self, whole: Tensor, like: Tensor) -> Tensor:
        """This rank's part of a tensor, as `like` is."""
        return whole

    def stopping(self, asked: bool) -> bool:
        """Whether to stop after this step, where one rank was asked to."""
        return asked


class Replicated(Alone):
    """DistributedDataParallel: each rank has it all; gradients are averaged, rank 0's buffers are everybody's."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__(model)
        ids = [device.index] if device.type == "cuda" else None
        self.net: Any = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
        keep_group(self.net)

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        """DDP's own way not to communicate."""
        return nullcontext() if last else self.net.no_sync()


class Sharded(Alone):
    """FSDP2: each rank has a part of every weight. Quantizer state is too small to be cut: it is replicated.

    FSDP2 refuses scalars, as scales per tensor are: these parameters are left out and averaged here, in one message.
    """

    measures_together = True

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
        """FSDP2's own way not to communicate."""
        sharded: Any = self.model
        sharded.set_requires_gradient_sync(last)
        return nullcontext()

    @torch.no_grad()
    def begin_step(self) -> None:
        """Rank 0's buffers, as with replicas."""
        share_buffers(self.model)

    @torch.no_grad()
    def end_backward(self) -> None:
        """Average what FSDP2 doesn't know."""
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
        """Sharded and replicated gradients don't mix in torch's own function."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norms = [self.whole(torch.linalg.vector_norm(gradient)) for gradient in gradients]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        factor = torch.clamp(largest / (norm + 1e-6), max=1.0)
        for gradient in gradients:
            gradient.mul_(factor)
        return norm

    def whole(self, tensor: Tensor) -> Tensor:
        """Gather."""
        full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        return full

    def part(self, whole: Tensor, like: Tensor) -> Tensor:
        """Cut as `like` is cut."""
        from torch.distributed.tensor import DTensor, distribute_tensor

        if not isinstance(like, DTensor) or whole.dim() == 0:
            return whole
        cut: Tensor = distribute_tensor(whole, like.device_mesh, like.placements)
        return cut

    def stopping(self, asked: bool) -> bool:
        """Checkpoints are gathered: all stop, or none."""
        flag = torch.tensor(float(asked), device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)


@torch.no_grad()
def share_buffers(model: nn.Module) -> None:
    """Rank 0's buffers on all ranks, in one message per kind of number."""
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for buffer in model.buffers():
        kinds.setdefault(buffer.dtype, []).append(buffer)
    for buffers in kinds.values():
        flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
        dist.broadcast(flat, src=0)
        for buffer, values in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
            buffer.copy_(values.view_as(buffer))
