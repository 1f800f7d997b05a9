"""The built-in workloads, registered as entry points of ``bitwright.workloads``.

The task `digits` needs no download: 8x8 handwritten digits, and a small network that trains in seconds. `digits.npz`
holds the test part of the data set "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, UCI Machine
Learning Repository, CC BY 4.0), which scikit-learn also ships. The network has the structures that are difficult to
quantize: a residual addition, a depthwise convolution, batch norms to fold, a pooled head.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from bitwright.workload import Workload
from bitwright.zoo.data import (
    Augmented,
    Images,
    data_folder,
    idx_images,
    image_folder,
    load_weights,
    npz_images,
    whole,
)
from bitwright.zoo.networks import DepthwiseNet, EfficientNetLite0, ResidualNet, ResNet20

__all__ = [
    "DigitsNet",
    "DigitsSplit",
    "depthwise_cifar10",
    "depthwise_fashion_mnist",
    "digits",
    "digits_split",
    "digits_untrained",
    "efficientnet_lite0_imagenet",
    "residual_cifar10",
    "residual_fashion_mnist",
    "resnet20_cifar10",
    "train_digits",
]

_TEST = 500
# Per channel, for pixel values 0 to 255.
_CIFAR_MEAN = (0.485 * 255, 0.456 * 255, 0.406 * 255)
_CIFAR_STD = (0.229 * 255, 0.224 * 255, 0.225 * 255)
_FASHION_MEAN, _FASHION_STD = (0.286 * 255,), (0.353 * 255,)
_LITE_MEAN = (127.0, 127.0, 127.0)
_LITE_STD = (128.0, 128.0, 128.0)
# The small networks use images of half the size (Fashion-MNIST 14x14, CIFAR-10 16x16), from a fixed shuffle.
TRAINED_ON, TESTED_ON, CALIBRATED_ON = 3000, 2000, 300


class DigitsSplit(NamedTuple):
    """1,297 training and 500 test images: float (N, 1, 8, 8) in [-1, 1], and int64 labels."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def digits_split(seed: int = 0) -> DigitsSplit:
    """Split the 1,797 digits with a seeded shuffle."""
    with (files("bitwright.zoo") / "digits.npz").open("rb") as file:
        data = np.load(file)
        images = torch.tensor(data["images"], dtype=torch.float32).unsqueeze(1) / 8 - 1
        labels = torch.tensor(data["labels"], dtype=torch.int64)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    train, test = order[_TEST:], order[:_TEST]
    return DigitsSplit(images[train], labels[train], images[test], labels[test])


class DigitsNet(nn.Module):
    """A stem, a residual block, a depthwise-separable convolution, and a linear head on pooled channels."""

    def __init__(self, width: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.stem_bn = nn.BatchNorm2d(width)
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.depthwise = nn.Conv2d(width, width, 3, stride=2, padding=1, groups=width, bias=False)
        self.depthwise_bn = nn.BatchNorm2d(width)
        self.pointwise = nn.Conv2d(width, 2 * width, 1, bias=False)
        self.pointwise_bn = nn.BatchNorm2d(2 * width)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """The logits of images (N, 1, 8, 8)."""
        x = F.relu(self.stem_bn(self.stem(x)))
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        x = F.relu(x + y)
        x = F.relu(self.depthwise_bn(self.depthwise(x)))
        x = F.relu(self.pointwise_bn(self.pointwise(x)))
        x = torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)
        logits: Tensor = self.head(x)
        return logits


def train_digits(
    seed: int = 0, epochs: int = 6, on_epoch: Callable[[int, int, float], None] | None = None
) -> DigitsNet:
    """Train a DigitsNet to a test accuracy of about 98 %. The same seed gives the same weights.

    ``on_epoch(done, epochs, loss)`` is called after each epoch.
    """
    split = digits_split()
    n, batch = len(split.train_images), 64
    # The caller's random state stays unchanged.
    with torch.random.fork_rng(devices=[]), _one_thread():
        torch.manual_seed(seed)
        model = DigitsNet()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-2)
        steps = epochs * -(-n // batch)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps)
        for epoch in range(epochs):
            total = 0.0
            for index in torch.randperm(n).split(batch):
                loss = F.cross_entropy(model(split.train_images[index]), split.train_labels[index])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                total += loss.item() * len(index)
            if on_epoch is not None:
                on_epoch(epoch + 1, epochs, total / n)
    return model.eval()


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread: small operators don't need more, and sums don't depend on the number of cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def digits(on_epoch: Callable[[int, int, float], None] | None = None) -> Workload:
    """scikit-learn's digits: a network that is trained in seconds and calibrated with 256 training images.

    ``on_epoch(done, epochs, loss)`` is called after each epoch.
    """
    return _digits("digits", train_digits(on_epoch=on_epoch))


def digits_untrained() -> Workload:
    """The same network and data, untrained, for ``bitwright train``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _digits("digits-untrained", DigitsNet())


def _digits(name: str, model: DigitsNet) -> Workload:
    split = digits_split()

    def calibration() -> Iterator[Tensor]:
        yield from split.train_images[:256].split(64)

    def evaluation() -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(split.test_images.split(100), split.test_labels.split(100), strict=True)

    return Workload(
        name=name,
        model=model,
        inputs=(split.test_images[:1],),
        calibration=calibration,
        evaluation=evaluation,
        training=lambda: TensorDataset(split.train_images, split.train_labels),
        loss=F.cross_entropy,
    )


def resnet20_cifar10(data: Path | None = None) -> Workload:
    """ResNet-20 on CIFAR-10: calibrated on 512 training images, evaluated on the 10,000 test images.

    It trains on 25,000 images, randomly shifted and flipped.
    """
    folder = (data or data_folder()) / "cifar10"
    test = npz_images(folder / "test.npz")
    normalised = partial(Images.batches, mean=_CIFAR_MEAN, std=_CIFAR_STD)

    def calibration() -> Iterator[Tensor]:
        for images, _ in normalised(npz_images(folder / "train25k.npz").take(512, seed=0), 64):
            yield images

    return Workload(
        name="resnet20-cifar10",
        model=load_weights(ResNet20(), folder / "resnet20.safetensors"),
        inputs=(next(normalised(test, 1))[0],),
        calibration=calibration,
        evaluation=lambda: normalised(test, 250),
        training=lambda: Augmented(images=npz_images(folder / "train25k.npz"), mean=_CIFAR_MEAN, std=_CIFAR_STD),
        collate=whole,
        loss=F.cross_entropy,
    )


def efficientnet_lite0_imagenet(data: Path | None = None) -> Workload:
    """EfficientNet-Lite0 on 1,000 images of the ImageNet validation set.

    The data folder has no training set, so calibration uses 100 of the evaluation images (the first of a fixed shuffle,
    without labels). Evaluation uses all 1,000 images, including these.
    """
    folder = (data or data_folder()) / "imagenet-val"
    images = image_folder(folder / "images")
    normalised = partial(Images.batches, mean=_LITE_MEAN, std=_LITE_STD)

    def calibration() -> Iterator[Tensor]:
        for batch, _ in normalised(images.take(100, seed=0), 25):
            yield batch

    return Workload(
        name="efficientnet-lite0-imagenet",
        model=load_weights(EfficientNetLite0(), folder / "efficientnet_lite0.safetensors"),
        inputs=(next(normalised(images, 1))[0],),
        calibration=calibration,
        evaluation=lambda: normalised(images, 50),
        loss=F.cross_entropy,
    )


def residual_fashion_mnist() -> Workload:
    """A residual network with 8 and 16 channels on Fashion-MNIST, 14x14."""
    return _small(
        "residual-fashion-mnist", ResidualNet(channels=1), _fashion_mnist(data_folder()), _FASHION_MEAN, _FASHION_STD
    )


def depthwise_fashion_mnist() -> Workload:
    """A small MobileNetV2 on Fashion-MNIST, 14x14."""
    return _small(
        "depthwise-fashion-mnist", DepthwiseNet(channels=1), _fashion_mnist(data_folder()), _FASHION_MEAN, _FASHION_STD
    )


def residual_cifar10() -> Workload:
    """A residual network with 8 and 16 channels on CIFAR-10, 16x16."""
    return _small("residual-cifar10", ResidualNet(channels=3), _cifar10(data_folder()), _CIFAR_MEAN, _CIFAR_STD)


def depthwise_cifar10() -> Workload:
    """A small MobileNetV2 on CIFAR-10, 16x16."""
    return _small("depthwise-cifar10", DepthwiseNet(channels=3), _cifar10(data_folder()), _CIFAR_MEAN, _CIFAR_STD)


def _small(
    name: str, model: nn.Module, data: tuple[Images, Images], mean: tuple[float, ...], std: tuple[float, ...]
) -> Workload:
    train, test = data
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
