"""The reference networks: ResNet-20, EfficientNet-Lite0 and two small networks that train in seconds on one core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["DepthwiseNet", "EfficientNetLite0", "Norm", "ResNet20", "ResidualNet"]


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
    """ResNet-20 for CIFAR-10: three stages of three blocks, with 16, 32 and 64 channels.

    The shortcuts have no parameters (option A of He et al., 2015).
    """

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


# EfficientNet-Lite0, per stage: blocks, kernel size, stride of the first block, channels, expansion.
_STAGES = (
    (1, 3, 1, 16, 1),
    (2, 3, 2, 24, 6),
    (2, 5, 2, 40, 6),
    (3, 3, 2, 80, 6),
    (3, 5, 1, 112, 6),
    (4, 5, 2, 192, 6),
    (1, 3, 1, 320, 6),
)
_EPS, _MOMENTUM = 1e-3, 0.01  # of its batch norms


def same_padding(size: int, kernel: int, stride: int) -> tuple[int, int]:
    """TensorFlow's "same" padding of one dimension: (before, after).

    >>> same_padding(112, kernel=3, stride=1), same_padding(224, kernel=3, stride=2)
    ((1, 1), (0, 1))
    >>> same_padding(56, kernel=5, stride=2)
    (1, 2)
    """
    total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
    return total // 2, total - total // 2


def _padding_and_conv(
    channels_in: int, channels: int, kernel: int, stride: int, size: int, groups: int = 1
) -> tuple[nn.Module, nn.Conv2d]:
    """A convolution, and a padding module for asymmetric padding."""
    before, after = same_padding(size, kernel, stride)
    even = before == after
    pad = nn.Identity() if even else nn.ZeroPad2d((before, after, before, after))
    conv = nn.Conv2d(channels_in, channels, kernel, stride, padding=before if even else 0, groups=groups, bias=False)
    return pad, conv


class Norm(Protocol):
    """A class or function that makes the norm of some channels, such as `nn.BatchNorm2d`."""

    def __call__(self, num_features: int, /, *, eps: float = ..., momentum: float = ...) -> nn.Module:
        """Make the norm."""


class MBConv(nn.Module):
    """Expand, depthwise convolution, project; with a shortcut if the shape stays the same."""

    def __init__(
        self, channels_in: int, channels: int, kernel: int, stride: int, expansion: int, size: int, norm: Norm
    ) -> None:
        super().__init__()
        wide = channels_in * expansion
        self._expand_conv: nn.Conv2d | None = None
        if expansion != 1:
            self._expand_conv = nn.Conv2d(channels_in, wide, 1, bias=False)
            self._bn0 = norm(wide, eps=_EPS, momentum=_MOMENTUM)
        self._pad, self._depthwise_conv = _padding_and_conv(wide, wide, kernel, stride, size, groups=wide)
        self._bn1 = norm(wide, eps=_EPS, momentum=_MOMENTUM)
        self._project_conv = nn.Conv2d(wide, channels, 1, bias=False)
        self._bn2 = norm(channels, eps=_EPS, momentum=_MOMENTUM)
        self._shortcut = stride == 1 and channels_in == channels

    def forward(self, x: Tensor) -> Tensor:
        """Run the block. The projection is linear, as in MobileNetV2."""
        y: Tensor = x
        if self._expand_conv is not None:
            y = F.relu6(self._bn0(self._expand_conv(y)))
        y = F.relu6(self._bn1(self._depthwise_conv(self._pad(y))))
        y = self._bn2(self._project_conv(y))
        return y + x if self._shortcut else y


class EfficientNetLite0(nn.Module):
    """EfficientNet without squeeze-excite and with ReLU6, designed for integer hardware: 4.7 million parameters.

    The module has the keys of the public weight files, which come from TensorFlow. TensorFlow's "same" padding adds an
    odd pixel at the bottom right. All sizes are known when the model is built, so the padding is constant in the
    exported graph.
    """

    def __init__(
        self, classes: int = 1000, image_size: int = 224, dropout: float = 0.2, norm: Norm = nn.BatchNorm2d
    ) -> None:
        super().__init__()
        self.image_size = image_size
        self._pad, self._conv_stem = _padding_and_conv(3, 32, 3, 2, image_size)
        self._bn0 = norm(32, eps=_EPS, momentum=_MOMENTUM)
        size, channels_in = -(-image_size // 2), 32
        self._blocks = nn.ModuleList()
        for count, kernel, first_stride, channels, expansion in _STAGES:
            for index in range(count):
                stride = first_stride if index == 0 else 1
                self._blocks.append(MBConv(channels_in, channels, kernel, stride, expansion, size, norm))
                size, channels_in = -(-size // stride), channels
        self._conv_head = nn.Conv2d(channels_in, 1280, 1, bias=False)
        self._bn1 = norm(1280, eps=_EPS, momentum=_MOMENTUM)
        self._dropout = nn.Dropout(dropout)
        self._fc = nn.Linear(1280, classes)

    def forward(self, x: Tensor) -> Tensor:
        """The logits of normalized images. Their size must be `image_size`."""
        if x.shape[-2:] != (self.image_size, self.image_size):
            raise ValueError(
                f"images of {tuple(x.shape[-2:])} given to a model for {self.image_size}x{self.image_size}: "
                "resize them, or build EfficientNetLite0(image_size=...)"
            )
        x = F.relu6(self._bn0(self._conv_stem(self._pad(x))))
        for block in self._blocks:
            x = block(x)
        x = F.relu6(self._bn1(self._conv_head(x)))
        x = torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)
        logits: Tensor = self._fc(self._dropout(x))
        return logits


class _Residual(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution if the shape changes."""

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
        """Add the output of the convolutions to the shortcut."""
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + (x if self.short is None else self.short(x)))


class _Inverted(nn.Module):
    """MobileNetV2's block: expand, depthwise convolution, project; a shortcut if the shape stays the same."""

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
        """Run the block. The projection is linear."""
        y: Tensor = F.relu6(self.bn2(self.depthwise(F.relu6(self.bn1(self.expand(x))))))
        y = self.bn3(self.project(y))
        return x + y if self.shortcut else y


class _SmallNet(nn.Module):
    """A stem, two blocks (the second halves the image), a linear head on pooled channels."""

    def __init__(
        self,
        block: Callable[[int, int, int], nn.Module],
        activation: Callable[[Tensor], Tensor],
        channels: int,
        width: int,
        classes: int,
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 3, stride=2, padding=1, bias=False)
        self.stem_bn = nn.BatchNorm2d(width)
        self.block1 = block(width, width, 1)
        self.block2 = block(width, 2 * width, 2)
        self.head = nn.Linear(2 * width, classes)
        self._activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        x = self.block2(self.block1(self._activation(self.stem_bn(self.stem(x)))))
        logits: Tensor = self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))
        return logits


class ResidualNet(_SmallNet):
    """A small network with two residual blocks and ReLU."""

    def __init__(self, channels: int = 1, width: int = 8, classes: int = 10) -> None:
        super().__init__(_Residual, F.relu, channels, width, classes)


class DepthwiseNet(_SmallNet):
    """A small MobileNetV2: two inverted residuals with ReLU6."""

    def __init__(self, channels: int = 3, width: int = 8, classes: int = 10) -> None:
        super().__init__(_Inverted, F.relu6, channels, width, classes)
