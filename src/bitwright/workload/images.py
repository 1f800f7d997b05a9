"""Labelled images on disk as a data set: a class folder, or a list of files, with the transforms of ImageNet training.

Random transforms draw from torch's generator, which the trainer seeds for each batch. Results therefore depend on the
seed only, not on the number of processes that load images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from bitwright.core.arrays import read_picture
from bitwright.core.documents import read_text
from bitwright.core.errors import PlanError, Problem, WorkloadError
from bitwright.workload.datasets import PICTURES, random_part

__all__ = ["ImageFiles", "TransformedImages", "color_jitter"]

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_BILINEAR = 2
_STRENGTHS = (0.2, 0.2, 0.2, 0.1)
_SHOWN = 5


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


class TransformedImages(Dataset[tuple[Tensor, int]]):
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
