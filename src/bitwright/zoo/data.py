"""Loaders for the user's data folder, which the environment variable ``BITWRIGHT_DATA`` names.

The folder contains ``cifar10/`` (``test.npz``, ``train25k.npz``: ``images`` uint8 NHWC and ``labels``) and
``imagenet-val/`` (``images/NNNN_CCCC.jpg``: image number and class, 224x224), each with its model's
``*.safetensors``, and ``fashion-mnist/`` (gzipped IDX files).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from bitwright.core.arrays import npz_names, read_npz, read_picture, read_tensors
from bitwright.core.documents import gunzip, read_bytes
from bitwright.core.environment import DATA_VARIABLE
from bitwright.core.errors import WorkloadError

__all__ = [
    "Augmented",
    "Images",
    "data_folder",
    "existing",
    "idx_images",
    "image_folder",
    "load_weights",
    "npz_images",
    "whole",
]

_MOST_BYTES = 4 << 30
_IMAGE_NAME = re.compile(r"(\d+)_(\d+)\.jpg")


@dataclass(frozen=True, kw_only=True, eq=False)
class Images:
    """Labelled images, stored as uint8 to save memory."""

    pixels: Tensor  # uint8 (N, C, H, W)
    labels: Tensor  # int64 (N,)

    def __len__(self) -> int:
        """The number of images."""
        return len(self.labels)

    def take(self, count: int, *, seed: int) -> Images:
        """The first ``count`` images of a shuffle with this seed."""
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))[:count]
        return Images(pixels=self.pixels[order], labels=self.labels[order])

    def batches(self, size: int, *, mean: tuple[float, ...], std: tuple[float, ...]) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of (normalized images, labels), in order. ``mean`` and ``std`` refer to pixel values 0 to 255."""
        shift, scale = (torch.tensor(v).view(1, -1, 1, 1) for v in (mean, std))
        for pixels, labels in zip(self.pixels.split(size), self.labels.split(size), strict=True):
            yield (pixels.float() - shift) / scale, labels


@dataclass(frozen=True, kw_only=True, eq=False)
class Augmented:
    """Training images, randomly shifted by up to `shift` pixels (zero padding) and flipped.

    A data set for `Workload(training=..., collate=whole)`: it returns complete batches, which is much faster than
    single images. It uses torch's generator, which the trainer seeds for each batch.
    """

    images: Images
    mean: tuple[float, ...]
    std: tuple[float, ...]
    shift: int = 4
    mirror: bool = True

    def __len__(self) -> int:
        """The number of images."""
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """One image and its label."""
        pixels, labels = self.__getitems__([index])
        return pixels[0], labels[0]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """A batch of images and labels."""
        mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (self.mean, self.std))
        images = (self.images.pixels[indices].float() - mean) / std
        n, _, height, width = images.shape
        padded = torch.nn.functional.pad(images, [self.shift] * 4)
        top, left = torch.randint(2 * self.shift + 1, (2, n, 1))
        rows, columns = top + torch.arange(height), left + torch.arange(width)
        if self.mirror:
            columns = torch.where(torch.rand(n, 1) < 0.5, columns.flip(1), columns)
        picked = padded.permute(0, 2, 3, 1)[torch.arange(n)[:, None, None], rows[:, :, None], columns[:, None, :]]
        return picked.permute(0, 3, 1, 2).contiguous(), self.images.labels[indices]


def whole(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The `collate` function of data sets that return complete batches."""
    return batch


def data_folder() -> Path:
    """The folder in ``BITWRIGHT_DATA``."""
    value = os.environ.get(DATA_VARIABLE)
    if not value:
        raise WorkloadError(
            f"the environment variable {DATA_VARIABLE} isn't set",
            fix=f"set {DATA_VARIABLE} to the folder that contains cifar10/ and imagenet-val/ "
            "(the workload 'digits' needs no data)",
            code="data-folder-not-set",
        )
    folder = Path(value).expanduser()
    if not folder.is_dir():
        raise WorkloadError(
            f"{DATA_VARIABLE} is not a folder",
            value=value,
            fix=f"set {DATA_VARIABLE} to an existing folder",
            code="data-folder-missing",
        )
    return folder


@lru_cache(maxsize=4)
def npz_images(path: Path) -> Images:
    """Read an ``.npz`` of ``images`` uint8 (N, H, W, 3) and ``labels`` (N,)."""
    names = npz_names(existing(path))
    if missing := {"images", "labels"} - set(names):
        raise WorkloadError(
            f"the archive has no {' and no '.join(sorted(missing))}",
            where=path.name,
            value=names,
            fix="save it with numpy.savez(path, images=..., labels=...)",
            code="missing-array",
        )
    pixels, labels = read_npz(path, ("images", "labels"))
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or len(pixels) != len(labels):
        raise WorkloadError(
            "the archive must have uint8 images (N, H, W, 3) and one label per image",
            where=path.name,
            value=f"{pixels.dtype} {pixels.shape}, {len(labels)} labels",
            fix="store the original images, without normalizing or transposing them",
            code="invalid-data",
        )
    return Images(
        pixels=torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(),
        labels=torch.from_numpy(labels.astype(np.int64)),
    )


@lru_cache(maxsize=4)
def idx_images(images: Path, labels: Path) -> Images:
    """Read a pair of gzipped IDX files, as in MNIST and Fashion-MNIST: grayscale images with one channel."""
    pixels, classes = _idx(images), _idx(labels)
    if pixels.dim() != 3 or classes.dim() != 1 or len(pixels) != len(classes):
        raise WorkloadError(
            "the IDX files must have images (N, H, W) and one label per image",
            where=f"{images.name}, {labels.name}",
            value=f"{tuple(pixels.shape)}, {tuple(classes.shape)}",
            fix="give the file of images first, then the labels of the same set",
            code="invalid-data",
        )
    return Images(pixels=pixels.unsqueeze(1), labels=classes.long())


def _idx(path: Path) -> Tensor:
    fix = "use the published file (idx1/idx3, .gz)"
    packed = read_bytes(existing(path), what="the data", fix=fix, error=WorkloadError, most=_MOST_BYTES)
    raw = gunzip(packed, where=path.name, most=_MOST_BYTES, error=WorkloadError, fix=fix)
    axes = raw[3] if len(raw) > 3 else 0
    shape = np.frombuffer(raw, ">u4", count=axes, offset=4) if len(raw) >= 4 + 4 * axes else np.zeros(0)
    if raw[:3] != b"\0\0\x08" or len(raw) != 4 + 4 * axes + prod(map(int, shape)):
        raise WorkloadError("not an IDX file of bytes", where=path.name, fix=fix, code="invalid-data")
    values = np.frombuffer(raw, np.uint8, offset=4 + 4 * axes).reshape(shape)
    return torch.from_numpy(values.copy())


@lru_cache(maxsize=1)
def image_folder(path: Path, size: int = 224) -> Images:
    """Decode a folder of ``NNNN_CCCC.jpg`` images (number, class). The result is cached."""
    named = [(f, m) for f in sorted(existing(path).iterdir()) if (m := _IMAGE_NAME.fullmatch(f.name))]
    if not named:
        raise WorkloadError(
            "the folder has no images",
            where=path.name,
            value=str(path),
            fix="name them NNNN_CCCC.jpg: number, class",
            code="no-data",
        )
    pixels = np.empty((len(named), size, size, 3), dtype=np.uint8)
    for slot, (file, _) in zip(pixels, named, strict=True):
        image = read_picture(file)
        if image.size != (size, size):
            raise WorkloadError(
                f"an image is not {size}x{size}",
                where=file.name,
                value=image.size,
                fix=f"resize the shorter side to {size * 8 // 7} and crop the center",
                code="invalid-data",
            )
        slot[...] = np.asarray(image)
    return Images(
        pixels=torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(),
        labels=torch.tensor([int(match[2]) for _, match in named]),
    )


def load_weights(model: nn.Module, path: Path) -> nn.Module:
    """Load a ``.safetensors`` file strictly and return the model in evaluation mode."""
    fix = "use the weights of this model"
    tensors = read_tensors(existing(path), fix=fix, what="the weights file")
    try:
        model.load_state_dict(tensors, strict=True)
    except RuntimeError as error:
        raise WorkloadError(
            f"the weights don't match the model: {error}", where=path.name, fix=fix, code="weights-mismatch"
        ) from error
    return model.eval()


def existing(path: Path) -> Path:
    """The path. Raises an error if it is missing in the data folder."""
    if not path.exists():
        raise WorkloadError(
            f"the data folder has no {path.name}",
            value=str(path),
            fix=f"add it, or change {DATA_VARIABLE}",
            code="data-file-missing",
        )
    return path
