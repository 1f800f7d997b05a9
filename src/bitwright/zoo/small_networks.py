"""Small untrained networks on small images, which can be trained in seconds on one core.

Images are downsampled to half their size (Fashion-MNIST 14x14, CIFAR-10 16x16). There are 3,000 training and 2,000 test
images, taken from a fixed shuffle.
"""

from __future__ import annotations

from functools import lru_cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitwright.workload import Workload
from bitwright.zoo.data import Augmented, Images, data_folder, idx_images, npz_images, whole

__all__ = [
    "DepthwiseNet",
    "ResidualNet",
    "depthwise_cifar10",
    "depthwise_fashion_mnist",
    "residual_cifar10",
    "residual_fashion_mnist",
]


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
        """The logits."""
        x = self.block2(self.block1(F.relu(self.stem_bn(self.stem(x)))))
        logits: Tensor = self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))
        return logits


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


class DepthwiseNet(nn.Module):
    """A small MobileNetV2: a stem, two inverted residuals with ReLU6, a linear head on pooled channels."""

    def __init__(self, channels: int = 3, width: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 3, stride=2, padding=1, bias=False)
        self.stem_bn = nn.BatchNorm2d(width)
        self.block1 = _Inverted(width, width, stride=1)
        self.block2 = _Inverted(width, 2 * width, stride=2)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        x = F.relu6(self.stem_bn(self.stem(x)))
        x = self.block2(self.block1(x))
        logits: Tensor = self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))
        return logits


TRAINED_ON, TESTED_ON, CALIBRATED_ON = 3000, 2000, 300
# Per channel, for pixel values 0 to 255.
_GREY = ((0.286 * 255,), (0.353 * 255,))
_COLOUR = ((0.485 * 255, 0.456 * 255, 0.406 * 255), (0.229 * 255, 0.224 * 255, 0.225 * 255))


def residual_fashion_mnist() -> Workload:
    """A residual network with 8 and 16 channels on Fashion-MNIST, 14x14."""
    return _workload("residual-fashion-mnist", ResidualNet(channels=1), *_fashion_mnist(data_folder()), _GREY)


def depthwise_fashion_mnist() -> Workload:
    """A small MobileNetV2 on Fashion-MNIST, 14x14."""
    return _workload("depthwise-fashion-mnist", DepthwiseNet(channels=1), *_fashion_mnist(data_folder()), _GREY)


def residual_cifar10() -> Workload:
    """A residual network with 8 and 16 channels on CIFAR-10, 16x16."""
    return _workload("residual-cifar10", ResidualNet(channels=3), *_cifar10(data_folder()), _COLOUR)


def depthwise_cifar10() -> Workload:
    """A small MobileNetV2 on CIFAR-10, 16x16."""
    return _workload("depthwise-cifar10", DepthwiseNet(channels=3), *_cifar10(data_folder()), _COLOUR)


def _workload(
    name: str, model: nn.Module, train: Images, test: Images, normal: tuple[tuple[float, ...], tuple[float, ...]]
) -> Workload:
    mean, std = normal
    batches = partial(Images.batches, mean=mean, std=std)
    return Workload(
        name=name,
        model=model,
        inputs=(next(batches(test, 1))[0],),
        calibration=lambda: (images for images, _ in batches(train.take(CALIBRATED_ON, seed=0), 100)),
        evaluation=lambda: batches(test, 500),
        training=lambda: Augmented(images=train, mean=mean, std=std, shift=1),
        collate=whole,
        loss=F.cross_entropy,
    )


@lru_cache(maxsize=1)
def _fashion_mnist(folder: Path) -> tuple[Images, Images]:
    files = folder / "fashion-mnist"
    train = idx_images(files / "train-images-idx3-ubyte.gz", files / "train-labels-idx1-ubyte.gz")
    test = idx_images(files / "t10k-images-idx3-ubyte.gz", files / "t10k-labels-idx1-ubyte.gz")
    return _halved(train.take(TRAINED_ON, seed=0)), _halved(test.take(TESTED_ON, seed=0))


@lru_cache(maxsize=1)
def _cifar10(folder: Path) -> tuple[Images, Images]:
    train, test = npz_images(folder / "cifar10" / "train25k.npz"), npz_images(folder / "cifar10" / "test.npz")
    return _halved(train.take(TRAINED_ON, seed=0)), _halved(test.take(TESTED_ON, seed=0))


def _halved(images: Images) -> Images:
    """Average 2x2 pixels."""
    return Images(pixels=F.avg_pool2d(images.pixels.float(), 2).round().byte(), labels=images.labels)
