"""The built-in workloads, registered as entry points of ``bitwright.workloads``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path

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
from bitwright.zoo.digits import DigitsNet, digits_split, train_digits
from bitwright.zoo.networks import DepthwiseNet, EfficientNetLite0, ResidualNet, ResNet20

__all__ = [
    "depthwise_cifar10",
    "depthwise_fashion_mnist",
    "digits",
    "digits_untrained",
    "efficientnet_lite0_imagenet",
    "residual_cifar10",
    "residual_fashion_mnist",
    "resnet20_cifar10",
]

# Per channel, for pixel values 0 to 255.
_CIFAR_MEAN = (0.485 * 255, 0.456 * 255, 0.406 * 255)
_CIFAR_STD = (0.229 * 255, 0.224 * 255, 0.225 * 255)
_FASHION_MEAN, _FASHION_STD = (0.286 * 255,), (0.353 * 255,)
_LITE_MEAN = (127.0, 127.0, 127.0)
_LITE_STD = (128.0, 128.0, 128.0)
# The small networks use images of half the size (Fashion-MNIST 14x14, CIFAR-10 16x16), from a fixed shuffle.
TRAINED_ON, TESTED_ON, CALIBRATED_ON = 3000, 2000, 300


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
