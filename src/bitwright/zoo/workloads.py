"""The built-in workloads, registered as entry points of ``bitwright.workloads``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

from bitwright.workload import Workload
from bitwright.zoo.data import Augmented, Images, data_folder, image_folder, load_weights, npz_images, whole
from bitwright.zoo.digits import DigitsNet, digits_split, train_digits
from bitwright.zoo.efficientnet_lite import EfficientNetLite0
from bitwright.zoo.resnet20 import ResNet20

__all__ = ["digits", "digits_untrained", "efficientnet_lite0_imagenet", "resnet20_cifar10"]

# Per channel, for pixel values 0 to 255.
_CIFAR_MEAN = (0.485 * 255, 0.456 * 255, 0.406 * 255)
_CIFAR_STD = (0.229 * 255, 0.224 * 255, 0.225 * 255)
_LITE_MEAN = (127.0, 127.0, 127.0)
_LITE_STD = (128.0, 128.0, 128.0)


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
