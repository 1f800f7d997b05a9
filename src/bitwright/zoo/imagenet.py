"""The ImageNet networks of MQBench and QSync, without weights: ResNet, MobileNetV2, RegNetX, VGG, EfficientNet-Lite0.

ResNet, MobileNetV2, RegNetX and VGG have torchvision's parameter names, so torchvision's checkpoints load strictly.
ResNeSt (Zhang et al., 2020: ResNet with split attention) has those of the authors' package `resnest`. Each function is
an entry point of `bitwright.networks` and has the same arguments.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitwright.zoo.networks import EfficientNetLite0, Norm

__all__ = [
    "VGG16",
    "MobileNetV2",
    "RegNetX",
    "ResNeSt",
    "ResNet",
    "efficientnetlite_b0",
    "mobilenet_v2",
    "regnetx_600m",
    "regnetx_800m",
    "resnest50",
    "resnet18",
    "resnet50",
    "vgg16",
]


# MobileNetV2, per stage: expansion, channels, blocks, stride of the first block.
_INVERTED = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


def _conv(channels_in: int, channels: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    padding = kernel // 2
    return nn.Conv2d(channels_in, channels, kernel, stride, padding=padding, groups=groups, bias=False)


def _pooled(x: Tensor) -> Tensor:
    return torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)


class _Basic(nn.Module):
    """ResNet's block of two 3x3 convolutions."""

    expansion = 1

    def __init__(self, channels_in: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = _conv(channels_in, width, 3, stride)
        self.bn1 = norm(width)
        self.conv2 = _conv(width, width, 3)
        self.bn2 = norm(width)
        self.downsample = _shortcut(channels_in, width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        """Add the output of the convolutions to the shortcut."""
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class _Bottleneck(nn.Module):
    """ResNet's block of 1x1, 3x3 and 1x1 convolutions. The 3x3 convolution has the stride, as in torchvision."""

    expansion = 4

    def __init__(self, channels_in: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = _conv(channels_in, width)
        self.bn1 = norm(width)
        self.conv2 = _conv(width, width, 3, stride)
        self.bn2 = norm(width)
        self.conv3 = _conv(width, 4 * width)
        self.bn3 = norm(4 * width)
        self.downsample = _shortcut(channels_in, 4 * width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        """Add the output of the convolutions to the shortcut."""
        y = F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))
        y = self.bn3(self.conv3(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


def _shortcut(channels_in: int, channels: int, stride: int, norm: Norm) -> nn.Sequential | None:
    """A 1x1 convolution where the shape changes."""
    if stride == 1 and channels_in == channels:
        return None
    return nn.Sequential(_conv(channels_in, channels, 1, stride), norm(channels))


class ResNet(nn.Module):
    """ResNet (He et al., 2015) with torchvision's names and initial weights."""

    def __init__(
        self,
        block: type[_Basic | _Bottleneck],
        depths: Sequence[int],
        *,
        classes: int = 1000,
        dropout: float = 0.0,
        norm: Norm = nn.BatchNorm2d,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
        self.bn1 = norm(64)
        before = 64
        stages: list[nn.Sequential] = []
        for index, depth in enumerate(depths):
            width, blocks = 64 << index, []
            for position in range(depth):
                stride = 2 if index and not position else 1
                blocks.append(block(before, width, stride, norm))
                before = width * block.expansion
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(before, classes)
        _initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        """The logits of normalized images."""
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, padding=1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(self.dropout(_pooled(x)))
        return logits


class _ConvNormAct(nn.Sequential):
    """A convolution, a batch norm and an activation; torchvision numbers them 0, 1 and 2."""

    def __init__(self, conv: nn.Conv2d, norm: Norm, activation: type[nn.Module] | None) -> None:
        parts = [conv, norm(conv.out_channels)]
        super().__init__(*parts, *([] if activation is None else [activation()]))


class _InvertedResidual(nn.Module):
    """MobileNetV2's block: expand, depthwise convolution, project; a shortcut if the shape stays the same."""

    def __init__(self, channels_in: int, channels: int, stride: int, expansion: int, norm: Norm) -> None:
        super().__init__()
        wide = channels_in * expansion
        layers: list[nn.Module] = []
        if expansion != 1:
            layers.append(_ConvNormAct(_conv(channels_in, wide), norm, nn.ReLU6))
        layers.append(_ConvNormAct(_conv(wide, wide, 3, stride, groups=wide), norm, nn.ReLU6))
        self.conv = nn.Sequential(*layers, _conv(wide, channels), norm(channels))
        self.shortcut = stride == 1 and channels_in == channels

    def forward(self, x: Tensor) -> Tensor:
        """Run the block. The projection is linear."""
        y: Tensor = self.conv(x)
        return x + y if self.shortcut else y


class MobileNetV2(nn.Module):
    """MobileNetV2 (Sandler et al., 2018) of width 1 with torchvision's names and initial weights."""

    def __init__(self, *, classes: int = 1000, dropout: float = 0.2, norm: Norm = nn.BatchNorm2d) -> None:
        super().__init__()
        layers: list[nn.Module] = [_ConvNormAct(_conv(3, 32, 3, 2), norm, nn.ReLU6)]
        before = 32
        for expansion, channels, depth, first_stride in _INVERTED:
            for position in range(depth):
                stride = 1 if position else first_stride
                layers.append(_InvertedResidual(before, channels, stride, expansion, norm))
                before = channels
        layers.append(_ConvNormAct(_conv(before, 1280), norm, nn.ReLU6))
        self.features = nn.Sequential(*layers)
        head = nn.Linear(1280, classes)
        self.classifier = nn.Sequential(nn.Dropout(dropout), head)
        _initialize(self)
        nn.init.normal_(head.weight, 0, 0.01)
        nn.init.zeros_(head.bias)

    def forward(self, x: Tensor) -> Tensor:
        """The logits of normalized images."""
        logits: Tensor = self.classifier(_pooled(self.features(x)))
        return logits


class _XBlock(nn.Module):
    """RegNetX's block: 1x1, grouped 3x3 and 1x1 convolutions with a shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int, group_width: int, norm: Norm) -> None:
        super().__init__()
        self.proj: _ConvNormAct | None = None
        if stride != 1 or channels_in != channels:
            self.proj = _ConvNormAct(_conv(channels_in, channels, 1, stride), norm, None)
        grouped = _conv(channels, channels, 3, stride, groups=channels // group_width)
        self.f = nn.Sequential(
            OrderedDict(
                a=_ConvNormAct(_conv(channels_in, channels), norm, nn.ReLU),
                b=_ConvNormAct(grouped, norm, nn.ReLU),
                c=_ConvNormAct(_conv(channels, channels), norm, None),
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        """Add the output of the convolutions to the shortcut."""
        return F.relu((x if self.proj is None else self.proj(x)) + self.f(x))


class RegNetX(nn.Module):
    """RegNetX (Radosavovic et al., 2020) with torchvision's names and initial weights."""

    def __init__(
        self,
        depths: Sequence[int],
        widths: Sequence[int],
        group_width: int,
        *,
        classes: int = 1000,
        dropout: float = 0.0,
        norm: Norm = nn.BatchNorm2d,
    ) -> None:
        super().__init__()
        self.stem = _ConvNormAct(_conv(3, 32, 3, 2), norm, nn.ReLU)
        stages: OrderedDict[str, nn.Module] = OrderedDict()
        before = 32
        for number, (depth, width) in enumerate(zip(depths, widths, strict=True), 1):
            blocks: OrderedDict[str, nn.Module] = OrderedDict()
            for position in range(depth):
                stride = 1 if position else 2
                blocks[f"block{number}-{position}"] = _XBlock(before, width, stride, group_width, norm)
                before = width
            stages[f"block{number}"] = nn.Sequential(blocks)
        self.trunk_output = nn.Sequential(stages)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(before, classes)
        _initialize(self)
        nn.init.normal_(self.fc.weight, 0, 0.01)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        """The logits of normalized images."""
        logits: Tensor = self.fc(self.dropout(_pooled(self.trunk_output(self.stem(x)))))
        return logits


class VGG16(nn.Module):
    """VGG-16 (Simonyan & Zisserman, 2014) without batch norms, with torchvision's names and initial weights."""

    def __init__(self, *, classes: int = 1000, dropout: float = 0.5) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for depth, channels in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
            for _ in range(depth):
                layers += [nn.Conv2d(before, channels, 3, padding=1), nn.ReLU()]
                before = channels
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(7)
        parts = [nn.Linear(512 * 7 * 7, 4096), nn.ReLU(), nn.Dropout(dropout)]
        parts += [nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout(dropout)]
        self.classifier = nn.Sequential(*parts, nn.Linear(4096, classes))
        _initialize(self)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0, 0.01)
            if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        """The logits of normalized images."""
        logits: Tensor = self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))
        return logits


def _initialize(model: nn.Module) -> None:
    """He's initial weights for convolutions, by the fan-out."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def resnet18(
    *, classes: int = 1000, dropout: float = 0.0, norm: Norm = nn.BatchNorm2d, image_size: int = 224
) -> ResNet:
    """ResNet-18: 11.7 million parameters. Images of any size."""
    return ResNet(_Basic, (2, 2, 2, 2), classes=classes, dropout=dropout, norm=norm)


def resnet50(
    *, classes: int = 1000, dropout: float = 0.0, norm: Norm = nn.BatchNorm2d, image_size: int = 224
) -> ResNet:
    """ResNet-50: 25.6 million parameters. Images of any size."""
    return ResNet(_Bottleneck, (3, 4, 6, 3), classes=classes, dropout=dropout, norm=norm)


def mobilenet_v2(
    *, classes: int = 1000, dropout: float = 0.2, norm: Norm = nn.BatchNorm2d, image_size: int = 224
) -> MobileNetV2:
    """MobileNetV2: 3.5 million parameters. Images of any size."""
    return MobileNetV2(classes=classes, dropout=dropout, norm=norm)


def regnetx_600m(
    *, classes: int = 1000, dropout: float = 0.0, norm: Norm = nn.BatchNorm2d, image_size: int = 224
) -> RegNetX:
    """RegNetX with 600 million multiplications: 6.2 million parameters. Images of any size."""
    return RegNetX((1, 3, 5, 7), (48, 96, 240, 528), 24, classes=classes, dropout=dropout, norm=norm)


def regnetx_800m(
    *, classes: int = 1000, dropout: float = 0.0, norm: Norm = nn.BatchNorm2d, image_size: int = 224
) -> RegNetX:
    """RegNetX with 800 million multiplications: 7.3 million parameters. Images of any size."""
    return RegNetX((1, 3, 7, 5), (64, 128, 288, 672), 16, classes=classes, dropout=dropout, norm=norm)


def efficientnetlite_b0(
    *, classes: int = 1000, dropout: float = 0.2, norm: Norm = nn.BatchNorm2d, image_size: int = 224
) -> EfficientNetLite0:
    """EfficientNet-Lite0: 4.7 million parameters. Images of `image_size`."""
    return EfficientNetLite0(classes=classes, dropout=dropout, image_size=image_size, norm=norm)


def vgg16(*, classes: int = 1000, dropout: float = 0.5, norm: Norm = nn.BatchNorm2d, image_size: int = 224) -> VGG16:
    """VGG-16: 138.4 million parameters and no norms, so `norm` has no effect. Images of any size."""
    return VGG16(classes=classes, dropout=dropout)


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


class _SplitBottleneck(nn.Module):
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
                    _SplitBottleneck(
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
