"""Workloads of a few seconds for `interruptions.py`; the order of all numbers is fixed."""

from __future__ import annotations

import planted as chains
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from bitwright import Workload


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 8, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(6))
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        for block in self.blocks:
            x = torch.relu(x + block(x))
        return self.head(x.mean((2, 3)))


def _data(seed: int, count: int = 256) -> Tensor:
    return torch.randn(count, 2, 8, 8, generator=torch.Generator().manual_seed(seed))


def images() -> Workload:
    torch.manual_seed(0)
    model = Net().eval()
    with torch.no_grad():
        targets = [model(_data(seed)).argmax(1) for seed in (1, 2)]
    return Workload(
        name="images",
        model=model,
        inputs=(_data(0)[:2],),
        calibration=lambda: _data(0).split(64),
        evaluation=lambda: zip(_data(1).split(64), targets[0].split(64), strict=True),
        training=lambda: TensorDataset(_data(2), targets[1]),
        loss=F.cross_entropy,
    )


def planted() -> Workload:
    return chains.workload(8, (3,), lower=True, samples=200)
