"""Small networks on small images, untrained: sizes at which a training takes seconds on one core.

Images are averaged down to half their side (Fashion-MNIST 14x14, CIFAR-10 16x16); there are 3,000 to train on and
2,000 to test on, each the first of a fixed shuffle.
"""

from __future__ import annotations

from functools import lru_cache, partial
from pathlib import Path

import torch.nn.functional as F
from torch import nn

from bitwright.workload import Workload
from bitwright.zoo.data import Augmented, Images, data_folder, idx_images, npz_images, whole
from bitwright.zoo.small_nets import DepthwiseNet, ResidualNet

__all__ = ["depthwise_cifar10", "depthwise_fashion_mnist", "residual_cifar10", "residual_fashion_mnist"]

TRAINED_ON, TESTED_ON, CALIBRATED_ON = 3000, 2000, 300
# Per channel, on the scale of 0 to 255.
_GREY = ((0.286 * 255,), (0.353 * 255,))
_COLOUR = ((0.485 * 255, 0.456 * 255, 0.406 * 255), (0.229 * 255, 0.224 * 255, 0.225 * 255))


def residual_fashion_mnist() -> Workload:
    """A residual network of 8 and 16 channels on Fashion-MNIST, 14x14."""
    return _workload("residual-fashion-mnist", ResidualNet(channels=1), *_fashion_mnist(data_folder()), _GREY)


def depthwise_fashion_mnist() -> Workload:
    """A small MobileNetV2 on Fashion-MNIST, 14x14."""
    return _workload("depthwise-fashion-mnist", DepthwiseNet(channels=1), *_fashion_mnist(data_folder()), _GREY)


def residual_cifar10() -> Workload:
    """A residual network of 8 and 16 channels on CIFAR-10, 16x16."""
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
    """Each pixel the mean of four."""
    return Images(pixels=F.avg_pool2d(images.pixels.float(), 2).round().byte(), labels=images.labels)
