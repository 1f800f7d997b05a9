"""ResNeSt (Zhang et al., 2020): ResNet with split attention, without weights.

Parameters have the names of the authors' package `resnest`, so its checkpoints load strictly.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitwright.zoo.networks import Norm

__all__ = ["ResNeSt", "resnest50"]

_EXPANSION = 4
_REDUCTION, _LEAST = 4, 32  # of the channels between the two layers of an attention


class SplitAttention(nn.Module):
    """A 3x3 convolution with `radix` results per group, which are added with weights that depend on the image."""

    def __init__(self, channels: int, stride: int, radix: int, groups: int, norm: Norm) -> None:
        super().__init__()
        between = max(channels * radix // _REDUCTION, _LEAST)
        self.conv = nn.Conv2d(channels, channels * radix, 3, stride, padding=1, groups=groups * radix, bias=False)
        self.bn0 = norm(channels * radix)
        self.fc1 = nn.Conv2d(channels, between, 1, groups=groups)
        self.bn1 = norm(between)
        self.fc2 = nn.Conv2d(between, channels * radix, 1, groups=groups)
        self.radix, self.groups = radix, groups

    def forward(self, x: Tensor) -> Tensor:
        """The weighted sum of the results. Their weights add up to 1 in each channel."""
        x = F.relu(self.bn0(self.conv(x)))
        batch, channels = x.shape[0], x.shape[1] // self.radix
        parts = torch.split(x, channels, dim=1)
        pooled = F.adaptive_avg_pool2d(sum(parts[1:], parts[0]), 1)
        scores = self.fc2(F.relu(self.bn1(self.fc1(pooled))))
        if self.radix == 1:
            return parts[0] * torch.sigmoid(scores)
        # fc2's channels are ordered by group first, the convolution's by result first.
        shares = F.softmax(scores.view(batch, self.groups, self.radix, -1).transpose(1, 2), dim=1)
        weights = torch.split(shares.reshape(batch, -1, 1, 1), channels, dim=1)
        products = [part * weight for part, weight in zip(parts, weights, strict=True)]
        return sum(products[1:], products[0])


class _Bottleneck(nn.Module):
    """1x1 convolution, split attention, 1x1 convolution. A pooling layer has the stride, on both branches."""

    def __init__(
        self, channels_in: int, width: int, stride: int, *, pooled: bool, radix: int, groups: int, norm: Norm
    ) -> None:
        super().__init__()
        channels = _EXPANSION * width
        self.conv1 = nn.Conv2d(channels_in, width, 1, bias=False)
        self.bn1 = norm(width)
        self.conv2 = SplitAttention(width, 1 if pooled else stride, radix, groups, norm)
        self.avd_layer = nn.AvgPool2d(3, stride, padding=1) if pooled else None
        self.conv3 = nn.Conv2d(width, channels, 1, bias=False)
        self.bn3 = norm(channels)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or channels_in != channels:
            self.downsample = nn.Sequential(
                nn.AvgPool2d(stride, stride, ceil_mode=True, count_include_pad=False),
                nn.Conv2d(channels_in, channels, 1, bias=False),
                norm(channels),
            )

    def forward(self, x: Tensor) -> Tensor:
        """Add the output of the convolutions to the shortcut."""
        y = self.conv2(F.relu(self.bn1(self.conv1(x))))
        if self.avd_layer is not None:
            y = self.avd_layer(y)
        y = self.bn3(self.conv3(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNeSt(nn.Module):
    """ResNeSt with a stem of three convolutions. `width` is the number of channels of the first stage's 3x3 layers."""

    def __init__(
        self,
        depths: Sequence[int],
        *,
        width: int = 64,
        radix: int = 2,
        groups: int = 1,
        classes: int = 1000,
        dropout: float = 0.0,
        norm: Norm = nn.BatchNorm2d,
    ) -> None:
        super().__init__()
        half = width // 2
        self.conv1 = nn.Sequential(
            nn.Conv2d(3, half, 3, 2, padding=1, bias=False),
            norm(half),
            nn.ReLU(),
            nn.Conv2d(half, half, 3, padding=1, bias=False),
            norm(half),
            nn.ReLU(),
            nn.Conv2d(half, width, 3, padding=1, bias=False),
        )
        self.bn1 = norm(width)
        before = width
        for index, depth in enumerate(depths):
            blocks: list[nn.Module] = []
            for position in range(depth):
                first = index > 0 and position == 0
                blocks.append(
                    _Bottleneck(
                        before,
                        width << index,
                        2 if first else 1,
                        pooled=first,
                        radix=radix,
                        groups=groups,
                        norm=norm,
                    )
                )
                before = _EXPANSION * (width << index)
            self.add_module(f"layer{index + 1}", nn.Sequential(*blocks))
        self._stages = len(depths)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(before, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """The logits of normalized images."""
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, padding=1)
        for number in range(1, self._stages + 1):
            x = self.get_submodule(f"layer{number}")(x)
        logits: Tensor = self.fc(self.dropout(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)))
        return logits


def resnest50(
    *, classes: int = 1000, dropout: float = 0.0, norm: Norm = nn.BatchNorm2d, image_size: int = 224
) -> ResNeSt:
    """ResNeSt-50, with two splits: 27.5 million parameters. Images of any size."""
    return ResNeSt((3, 4, 6, 3), classes=classes, dropout=dropout, norm=norm)
