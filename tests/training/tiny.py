"""A workload that trains in a second: random numbers in the data, in the model, and per-channel weights."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from bitwright import Workload


class Net(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(width)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x)))
        x = F.relu(self.second_norm(self.second(x)))
        logits: Tensor = self.head(self.drop(x.mean((2, 3))))
        return logits


class Stripes(Dataset[tuple[Tensor, int]]):
    """Horizontal, vertical or no stripes, with noise that is drawn anew each time, from torch and from Python."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        label = index % 3
        wave = torch.sin(torch.arange(8.0) * 1.5 + index)
        image = [wave[:, None].expand(8, 8), wave[None, :].expand(8, 8), torch.zeros(8, 8)][label]
        return (image + 0.3 * torch.randn(8, 8) + 0.1 * random.gauss(0, 1)).unsqueeze(0), label


def workload() -> Workload:
    torch.manual_seed(0)
    random.seed(0)
    fixed = [Stripes(300)[i] for i in range(300)]
    images, labels = torch.stack([x for x, _ in fixed]), torch.tensor([y for _, y in fixed])
    return Workload(
        name="stripes",
        model=Net(),
        inputs=(images[:1],),
        calibration=lambda: images[:128].split(32),
        evaluation=lambda: zip(images.split(100), labels.split(100), strict=True),
        training=lambda: Stripes(250),
        loss=F.cross_entropy,
    )
