"""A workload without norms, dropout or augmentation: how a batch is split makes no difference to it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from bitwright import Workload


def workload() -> Workload:
    """Two spirals: a net that doesn't learn is at 50 %."""
    generator = torch.Generator().manual_seed(0)
    turn = torch.rand(600, generator=generator) * 2.5
    arm = torch.arange(600) % 2
    angle = turn * 2.5 + arm * torch.pi
    data = torch.stack([turn * angle.cos(), turn * angle.sin()], 1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    return Workload(
        name="spirals",
        model=model,
        inputs=(data[:1],),
        training=lambda: TensorDataset(data[:500], arm[:500]),
        evaluation=lambda: [(data[500:], arm[500:])],
        loss=F.cross_entropy,
    )
