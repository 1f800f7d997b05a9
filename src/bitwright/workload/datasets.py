"""Data sets that a configuration file can name, and labelled images on disk with the transforms of ImageNet training.

A `Dataset` describes the user's files and folders, in batches. `TransformedImages` is a torch data set of a class
folder or a list of files. Its random transforms draw from torch's generator, which the trainer seeds for each batch.
Results therefore depend on the seed only, not on the number of processes that load images.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from bitwright.core.documents import read_npz, read_picture, read_text
from bitwright.core.errors import PlanError, Problem, WorkloadError
from bitwright.core.schemas import Strict

__all__ = ["PICTURES", "Dataset", "ImageFiles", "TransformedImages", "color_jitter", "random_part"]

PICTURES = (".jpg", ".jpeg", ".png", ".bmp")
_NUMBERED = re.compile(r"\d+_(\d+)\.(?:jpe?g|png|bmp)")  # number of the image, class
_MOST_PIXELS = 40_000_000
_MOST_RANDOM = 2**30
_FILTERS = {"nearest": 0, "bilinear": 2, "bicubic": 3}  # Pillow's Resampling
_AREAS, _RATIOS = (0.08, 1.0), (3 / 4, 4 / 3)  # ranges of random parts
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_BILINEAR = 2
_STRENGTHS = (0.2, 0.2, 0.2, 0.1)
_SHOWN = 5


class Dataset(Strict):
    """Where samples are and how they become tensors. Exactly one of `npz`, `images` and `random` is set.

    `npz`: a file with arrays `inputs` and `targets` (or the names in `keys`). `images`: a folder with one subfolder of
    images per class, or with files named NUMBER_CLASS.jpg. `random`: random numbers of this shape, for a first try.
    Images (uint8, channels last) are scaled to 0 to 1, transposed to channels first and normalized with (x − mean)/std.
    """

    npz: Path | None = None
    keys: tuple[str, str] = ("inputs", "targets")
    images: Path | None = None
    random: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(
        default=None, min_length=1, max_length=8, description="(samples, …)"
    )
    resize: int | None = Field(default=None, gt=0, le=10_000, description="Length of the shorter side of images.")
    crop: int | None = Field(default=None, gt=0, le=6_000, description="Size of the center crop of images.")
    random_crop: int | None = Field(
        default=None,
        gt=0,
        le=6_000,
        description="Size of a random part of images, like torchvision's RandomResizedCrop.",
    )
    flip: bool = Field(default=False, description="Mirror every second image, at random.")
    shuffle: bool = Field(default=False, description="Read images in random order.")
    seed: int = Field(default=0, ge=0, lt=2**32, description="Seed of random parts, mirroring and the order.")
    interpolation: Literal["nearest", "bilinear", "bicubic"] = Field(
        default="bicubic", description="The filter that resizes images."
    )
    mean: tuple[Annotated[float, Field(ge=-1e6, le=1e6)], ...] = ()
    std: tuple[Annotated[float, Field(ge=1e-6, le=1e6)], ...] = ()
    batch_size: int = Field(default=32, gt=0, le=1_000_000)

    @model_validator(mode="after")
    def _one(self) -> Dataset:
        if sum(source is not None for source in (self.npz, self.images, self.random)) != 1:
            raise ValueError("give exactly one of npz, images and random")
        if self.random is not None and prod(self.random) > _MOST_RANDOM:
            raise ValueError(f"random data of {prod(self.random)} numbers exceeds the limit of {_MOST_RANDOM}")
        if len(self.mean) != len(self.std):
            raise ValueError("mean and std have different lengths")
        if self.random_crop is not None and (self.resize is not None or self.crop is not None):
            raise ValueError("random_crop replaces resize and crop")
        return self

    def labelled(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of (inputs, targets)."""
        if self.images is not None:
            yield from self._pictures()
            return
        inputs, targets = self._arrays
        for start in range(0, len(inputs), self.batch_size):
            part = slice(start, start + self.batch_size)
            yield self._normalised(inputs[part]), targets[part]

    def inputs(self) -> Iterator[Tensor]:
        """Batches of inputs without targets."""
        return (inputs for inputs, _ in self.labelled())

    @cached_property
    def _arrays(self) -> tuple[Tensor, Tensor]:
        if self.random is not None:
            generator = torch.Generator().manual_seed(0)
            return torch.randn(self.random, generator=generator), torch.zeros(self.random[0], dtype=torch.int64)
        assert self.npz is not None
        inputs, targets = read_npz(self.npz, self.keys, fix="Set their names with keys: [inputs, targets]")
        if len(inputs) != len(targets):
            raise WorkloadError(
                "inputs and targets have different lengths",
                where=str(self.npz),
                value=f"{len(inputs)}, {len(targets)}",
                fix="give one target for each input",
                code="invalid-data",
            )
        kind = np.int64 if np.issubdtype(targets.dtype, np.integer) else np.float32
        return torch.from_numpy(inputs), torch.from_numpy(targets.astype(kind))

    def _normalised(self, batch: Tensor) -> Tensor:
        if batch.dtype == torch.uint8 and batch.ndim == 4:
            batch = batch.permute(0, 3, 1, 2).float() / 255
        batch = batch.contiguous() if batch.is_floating_point() else batch
        batch = batch.float() if batch.dtype == torch.float64 else batch
        if not self.mean:
            return batch
        channels = batch.shape[1] if batch.ndim > 1 else 0
        if len(self.mean) not in (1, channels):
            what = f"mean and std have {len(self.mean)} values, but the samples have {channels} channels"
            raise WorkloadError(
                what, where="mean", value=self.mean, fix="give one value for each channel", code="invalid-data"
            )
        shape = (1, -1, *(1,) * (batch.ndim - 2))
        return (batch - torch.tensor(self.mean).view(shape)) / torch.tensor(self.std).view(shape)

    def _pictures(self) -> Iterator[tuple[Tensor, Tensor]]:
        files = self.files()
        for start in range(0, len(files), self.batch_size):
            part = files[start : start + self.batch_size]
            pictures = [self._picture(file, start + offset) for offset, (file, _) in enumerate(part)]
            sizes = {tuple(picture.shape) for picture in pictures}
            if len(sizes) > 1:
                shown = "; ".join(f"{height} × {width}" for height, width, _ in sorted(sizes)[:3])
                fix = "set resize and crop to get one size"
                raise WorkloadError(
                    "images have different sizes", where=str(self.images), value=shown, fix=fix, code="invalid-data"
                )
            pixels = torch.stack(pictures)
            yield self._normalised(pixels), torch.tensor([index for _, index in part])

    def files(self) -> list[tuple[Path, int]]:
        """The images with their classes, in the order in which they are read."""
        assert self.images is not None
        inside = sorted(self.images.iterdir()) if self.images.is_dir() else []
        classes = [path for path in inside if path.is_dir()]
        files = [
            (file, index)
            for index, folder in enumerate(classes)
            for file in sorted(folder.iterdir())
            if file.suffix.lower() in PICTURES
        ] or [(file, int(found[1])) for file in inside if (found := _NUMBERED.fullmatch(file.name.lower()))]
        if not files:
            raise WorkloadError(
                "the folder has no images",
                where=str(self.images),
                fix="give a folder with one subfolder per class",
                code="no-data",
            )
        if self.shuffle:
            order = np.random.default_rng([self.seed, len(files)]).permutation(len(files))
            files = [files[index] for index in order]
        return files

    def _picture(self, file: Path, number: int) -> Tensor:
        image = read_picture(file)
        generator = np.random.default_rng([self.seed, number])
        if self.random_crop is not None:
            box = random_part(image.size, generator)
            image = image.resize((self.random_crop,) * 2, _FILTERS[self.interpolation], box=box)
        if self.flip and generator.random() < 0.5:
            image = image.transpose(0)  # Pillow's Transpose.FLIP_LEFT_RIGHT
        if self.resize is not None:
            ratio = self.resize / min(image.size)
            size = tuple(max(1, round(side * ratio)) for side in image.size)
            if prod(size) > _MOST_PIXELS:
                what = f"the image would have {size[0]} × {size[1]} pixels"
                raise WorkloadError(
                    what, where=str(file), value=image.size, fix="remove it, or reduce resize", code="image-too-large"
                )
            image = image.resize(size, _FILTERS[self.interpolation])
        if self.crop is not None:
            left, top = ((side - self.crop) // 2 for side in image.size)
            image = image.crop((left, top, left + self.crop, top + self.crop))
        return torch.from_numpy(np.array(image))


def random_part(
    size: tuple[int, int],
    generator: np.random.Generator,
    *,
    areas: Sequence[float] = _AREAS,
    ratios: Sequence[float] = _RATIOS,
) -> tuple[int, int, int, int]:
    """A random rectangle (left, top, right, bottom), by default with 8 to 100 % of the area and a ratio near 1.

    Like torchvision's RandomResizedCrop: ten tries, then the largest central part with an allowed ratio.
    """
    width, height = size
    for _ in range(10):
        area = width * height * generator.uniform(areas[0], areas[1])
        ratio = np.exp(generator.uniform(np.log(ratios[0]), np.log(ratios[1])))
        across, down = round(float(np.sqrt(area * ratio))), round(float(np.sqrt(area / ratio)))
        if 0 < across <= width and 0 < down <= height:
            left, top = int(generator.integers(width - across + 1)), int(generator.integers(height - down + 1))
            return left, top, left + across, top + down
    across, down = width, height
    if width / height < ratios[0]:
        down = min(height, max(1, round(width / ratios[0])))
    elif width / height > ratios[1]:
        across = min(width, max(1, round(height * ratios[1])))
    left, top = (width - across) // 2, (height - down) // 2
    return left, top, left + across, top + down


@dataclass(frozen=True, kw_only=True)
class ImageFiles:
    """Paths of images with their labels."""

    files: tuple[Path, ...]
    labels: tuple[int, ...]

    @classmethod
    def from_folder(cls, folder: Path) -> ImageFiles:
        """One subfolder per class. Labels follow the order of the names."""
        classes = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
        found = [
            (file, label)
            for label, own in enumerate(classes)
            for file in sorted(own.iterdir())
            if file.suffix.lower() in PICTURES
        ]
        if not found:
            fix = "give a folder with one subfolder of images per class"
            raise WorkloadError("the folder has no images in class folders", where=str(folder), fix=fix, code="no-data")
        files, labels = zip(*found, strict=True)
        return cls(files=files, labels=labels)

    @classmethod
    def from_list(cls, listing: Path, root: Path) -> ImageFiles:
        """A file with lines `path label`. Paths are relative to `root`. All damaged lines are reported together."""
        files: list[Path] = []
        labels: list[int] = []
        problems: list[Problem] = []
        for number, line in enumerate(
            read_text(listing, what="the list of images", fix="write lines: path label").splitlines(), 1
        ):
            if not line.strip():
                continue
            name, _, label = line.strip().rpartition(" ")
            if not name.strip() or not label.isdecimal():
                where = f"{listing}:{number}"
                what, fix = "the line isn't `path label`", "write the path, a space and the label, a number from 0"
                problems.append(Problem(what=what, where=where, value=line[:80], fix=fix, code="invalid-line"))
                continue
            files.append(root / name.strip())
            labels.append(int(label))
        missing = [file for file in files if not file.is_file()]
        if missing:
            what = f"{len(missing)} of {len(files)} images don't exist"
            shown = ", ".join(str(file) for file in missing[:_SHOWN])
            problems.append(
                Problem(what=what, where=str(listing), value=shown, fix="check the folder of images", code="no-data")
            )
        if not files and not problems:
            problems.append(Problem(what="the list is empty", where=str(listing), code="no-data"))
        if problems:
            raise PlanError(problems, title=f"{listing} has problems")
        return cls(files=tuple(files), labels=tuple(labels))


class TransformedImages(TorchDataset[tuple[Tensor, int]]):
    """Normalized images with labels.

    `transforms` are MQBench's: "STANDARD" is a random resized crop, a random flip and color jitter; "LINEAR" is the
    same without jitter; "ONECROP" resizes the shorter side to `resize` and crops the center.
    """

    def __init__(
        self,
        files: ImageFiles,
        *,
        transforms: Literal["STANDARD", "LINEAR", "ONECROP"],
        size: int,
        resize: int | None = None,
    ) -> None:
        if transforms == "ONECROP" and resize is not None and resize < size:
            raise WorkloadError(
                "images are smaller than the crop",
                where="test_resize",
                value=f"{resize}, crop {size}",
                fix="use a larger size",
                code="invalid-value",
            )
        self.files, self.transforms, self.size, self.resize = files, transforms, size, resize

    def __len__(self) -> int:
        return len(self.files.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        picture = read_picture(self.files.files[index])
        picture = self._center(picture) if self.transforms == "ONECROP" else self._random(picture)
        pixels = torch.from_numpy(np.asarray(picture, dtype=np.float32).transpose(2, 0, 1).copy()).div_(255)
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (_MEAN, _STD))
        return pixels.sub_(mean).div_(std), self.files.labels[index]

    def _center(self, picture: Any) -> Any:
        side = self.resize or self.size
        width, height = picture.size
        # torchvision truncates the longer side
        scaled = (side, int(side * height / width)) if width <= height else (int(side * width / height), side)
        picture = picture.resize(scaled, _BILINEAR)
        left, top = (round((length - self.size) / 2) for length in picture.size)
        return picture.crop((left, top, left + self.size, top + self.size))

    def _random(self, picture: Any) -> Any:
        generator = np.random.default_rng(int(torch.randint(2**62, ())))
        box = random_part(picture.size, generator)
        picture = picture.resize((self.size, self.size), _BILINEAR, box=box)
        if generator.random() < 0.5:
            picture = picture.transpose(0)  # Pillow's Transpose.FLIP_LEFT_RIGHT
        return color_jitter(picture, generator) if self.transforms == "STANDARD" else picture


def color_jitter(picture: Any, generator: np.random.Generator, strengths: Sequence[float] = _STRENGTHS) -> Any:
    """Change brightness, contrast, saturation and hue at random, in a random order, like torchvision's ColorJitter."""
    from PIL import Image, ImageEnhance

    def enhanced(kind: Callable[[Any], Any], strength: float) -> Callable[[Any], Any]:
        factor = generator.uniform(max(0.0, 1 - strength), 1 + strength)
        return lambda image: kind(image).enhance(factor)

    def hue(image: Any) -> Any:
        bands = list(image.convert("HSV").split())
        shifted = np.asarray(bands[0], dtype=np.uint8) + np.uint8(round(shift * 255) % 256)  # wraps, as hues do
        bands[0] = Image.fromarray(shifted, "L")
        return Image.merge("HSV", bands).convert("RGB")

    kinds = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
    changes = [enhanced(kind, strength) for kind, strength in zip(kinds, strengths[:3], strict=True)]
    shift = generator.uniform(-strengths[3], strengths[3])
    changes.append(hue)
    for index in generator.permutation(len(changes)):
        picture = changes[index](picture)
    return picture
