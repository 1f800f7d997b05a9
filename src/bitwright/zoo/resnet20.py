"""ResNet-20 for CIFAR-10, with parameter-free shortcuts (option A of He et al., 2015)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["ResNet20"]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut. The shortcut uses every second pixel if the size changes."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.stride = stride
        self.extra = channels - channels_in

    def forward(self, x: Tensor) -> Tensor:
        """Add the output of the convolutions to the shortcut."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        if self.extra:
            # Pad new channels with zeros on both sides: no parameters, no multiplications.
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.extra // 2, self.extra // 2))
        return F.relu(y + x)


class ResNet20(nn.Module):
    """Three stages of three blocks, with 16, 32 and 64 channels."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = self._stage(16, 16, stride=1)
        self.layer2 = self._stage(16, 32, stride=2)
        self.layer3 = self._stage(32, 64, stride=2)
        self.linear = nn.Linear(64, classes)

    @staticmethod
    def _stage(channels_in: int, channels: int, stride: int) -> nn.Sequential:
        return nn.Sequential(
            BasicBlock(channels_in, channels, stride),
            BasicBlock(channels, channels, 1),
            BasicBlock(channels, channels, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """The logits of normalized 32x32 images."""
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        x = F.adaptive_avg_pool2d(x, 1)
        logits: Tensor = self.linear(torch.flatten(x, 1))
        return logits
