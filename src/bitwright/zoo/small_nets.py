"""Two small networks for grids of many trainings: one with residual blocks, one with depthwise convolutions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["DepthwiseNet", "ResidualNet"]


class _Residual(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.short: nn.Sequential | None = None
        if stride != 1 or before != after:
            self.short = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        """Add the convolutions' result to the shortcut."""
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + (x if self.short is None else self.short(x)))


class ResidualNet(nn.Module):
    """A stem, two residual blocks (the second halves the image), a linear head on pooled channels."""

    def __init__(self, channels: int = 1, width: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 3, stride=2, padding=1, bias=False)
        self.stem_bn = nn.BatchNorm2d(width)
        self.block1 = _Residual(width, width, stride=1)
        self.block2 = _Residual(width, 2 * width, stride=2)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Give the logits."""
        x = self.block2(self.block1(F.relu(self.stem_bn(self.stem(x)))))
        logits: Tensor = self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))
        return logits


class _Inverted(nn.Module):
    """As in MobileNetV2: widen, filter each channel by itself, narrow; a shortcut where the shape stays."""

    def __init__(self, before: int, after: int, stride: int, expansion: int = 4) -> None:
        super().__init__()
        wide = before * expansion
        self.expand = nn.Conv2d(before, wide, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(wide)
        self.depthwise = nn.Conv2d(wide, wide, 3, stride, padding=1, groups=wide, bias=False)
        self.bn2 = nn.BatchNorm2d(wide)
        self.project = nn.Conv2d(wide, after, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(after)
        self.shortcut = stride == 1 and before == after

    def forward(self, x: Tensor) -> Tensor:
        """Run the block; the projection is linear."""
        y: Tensor = F.relu6(self.bn2(self.depthwise(F.relu6(self.bn1(self.expand(x))))))
        y = self.bn3(self.project(y))
        return x + y if self.shortcut else y


class DepthwiseNet(nn.Module):
    """A stem, two inverted residuals with ReLU6, a linear head on pooled channels: MobileNetV2 in small."""

    def __init__(self, channels: int = 3, width: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 3, stride=2, padding=1, bias=False)
        self.stem_bn = nn.BatchNorm2d(width)
        self.block1 = _Inverted(width, width, stride=1)
        self.block2 = _Inverted(width, 2 * width, stride=2)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Give the logits."""
        x = F.relu6(self.stem_bn(self.stem(x)))
        x = self.block2(self.block1(x))
        logits: Tensor = self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))
        return logits
