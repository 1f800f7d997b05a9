"""EfficientNet-Lite0: EfficientNet without squeeze-excite and with ReLU6, designed for integer hardware.

The public weights come from TensorFlow. Its "same" padding adds an odd pixel at the bottom right. All sizes are known
when the model is built, so the padding is constant in the exported graph.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["EfficientNetLite0"]

# Per stage: blocks, kernel size, stride of the first block, channels, expansion.
_STAGES = (
    (1, 3, 1, 16, 1),
    (2, 3, 2, 24, 6),
    (2, 5, 2, 40, 6),
    (3, 3, 2, 80, 6),
    (3, 5, 1, 112, 6),
    (4, 5, 2, 192, 6),
    (1, 3, 1, 320, 6),
)


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


def _bn(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01)


class MBConv(nn.Module):
    """Expand, depthwise convolution, project; with a shortcut if the shape stays the same."""

    def __init__(self, channels_in: int, channels: int, kernel: int, stride: int, expansion: int, size: int) -> None:
        super().__init__()
        wide = channels_in * expansion
        self._expand_conv: nn.Conv2d | None = None
        if expansion != 1:
            self._expand_conv = nn.Conv2d(channels_in, wide, 1, bias=False)
            self._bn0 = _bn(wide)
        self._pad, self._depthwise_conv = _padding_and_conv(wide, wide, kernel, stride, size, groups=wide)
        self._bn1 = _bn(wide)
        self._project_conv = nn.Conv2d(wide, channels, 1, bias=False)
        self._bn2 = _bn(channels)
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
    """4.7 million parameters, with the keys of the public weight files."""

    def __init__(self, classes: int = 1000, image_size: int = 224, dropout: float = 0.2) -> None:
        super().__init__()
        self.image_size = image_size
        self._pad, self._conv_stem = _padding_and_conv(3, 32, 3, 2, image_size)
        self._bn0 = _bn(32)
        size, channels_in = -(-image_size // 2), 32
        self._blocks = nn.ModuleList()
        for count, kernel, first_stride, channels, expansion in _STAGES:
            for index in range(count):
                stride = first_stride if index == 0 else 1
                self._blocks.append(MBConv(channels_in, channels, kernel, stride, expansion, size))
                size, channels_in = -(-size // stride), channels
        self._conv_head = nn.Conv2d(channels_in, 1280, 1, bias=False)
        self._bn1 = _bn(1280)
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
