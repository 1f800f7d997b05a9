"""Data that a configuration can name: files and folders of the user's, in batches."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from bitwright.errors import WorkloadError, did_you_mean

_PICTURES = (".jpg", ".jpeg", ".png", ".bmp")


class Dataset(BaseModel):
    """Where samples are, and how they become tensors. Exactly one of `npz`, `images` and `random`.

    `npz`: a file with arrays `inputs` and `targets` (or as `keys` names them). `images`: a folder with one folder of
    pictures for each class. `random`: numbers of this shape, for a first try. Pictures (uint8, channels last) become
    floats of 0 to 1, channels first, then (x − mean)/std.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    npz: Path | None = None
    keys: tuple[str, str] = ("inputs", "targets")
    images: Path | None = None
    random: tuple[int, ...] | None = Field(default=None, description="(samples, …)")
    resize: int | None = Field(default=None, gt=0, description="Of pictures: the shorter side.")
    crop: int | None = Field(default=None, gt=0, description="Of pictures: a square in the middle.")
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    batch_size: int = Field(default=32, gt=0)

    @model_validator(mode="after")
    def _one(self) -> Dataset:
        if sum(source is not None for source in (self.npz, self.images, self.random)) != 1:
            raise ValueError("give exactly one of npz, images and random")
        if len(self.mean) != len(self.std):
            raise ValueError("mean and std have different lengths")
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
        """Batches of inputs alone."""
        return (inputs for inputs, _ in self.labelled())

    @cached_property
    def _arrays(self) -> tuple[Tensor, Tensor]:
        if self.random is not None:
            generator = torch.Generator().manual_seed(0)
            return torch.randn(self.random, generator=generator), torch.zeros(self.random[0], dtype=torch.int64)
        assert self.npz is not None
        try:
            with np.load(self.npz, allow_pickle=False) as file:
                missing = [key for key in self.keys if key not in file.files]
                if missing:
                    raise WorkloadError(
                        "the file has no such array",
                        where=str(self.npz),
                        value=missing[0],
                        fix=f"{did_you_mean(missing[0], file.files)} Name them with keys: [inputs, targets]",
                    )
                inputs, targets = (file[key] for key in self.keys)
        except (OSError, ValueError) as error:
            raise WorkloadError(
                f"can't read the data: {error}", where=str(self.npz), fix="give an .npz file"
            ) from error
        if len(inputs) != len(targets):
            raise WorkloadError(
                "inputs and targets have different lengths",
                where=str(self.npz),
                value=f"{len(inputs)}, {len(targets)}",
                fix="one target for each input",
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
        shape = (1, -1, *(1,) * (batch.ndim - 2))
        return (batch - torch.tensor(self.mean).view(shape)) / torch.tensor(self.std).view(shape)

    def _pictures(self) -> Iterator[tuple[Tensor, Tensor]]:
        assert self.images is not None
        classes = sorted(path for path in self.images.iterdir() if path.is_dir()) if self.images.is_dir() else []
        files = [
            (file, index)
            for index, folder in enumerate(classes)
            for file in sorted(folder.iterdir())
            if file.suffix.lower() in _PICTURES
        ]
        if not files:
            raise WorkloadError(
                "there are no pictures", where=str(self.images), fix="give a folder with one folder for each class"
            )
        for start in range(0, len(files), self.batch_size):
            part = files[start : start + self.batch_size]
            pixels = torch.stack([self._picture(file) for file, _ in part])
            yield self._normalised(pixels), torch.tensor([index for _, index in part])

    def _picture(self, file: Path) -> Tensor:
        image_module = _pillow()
        with image_module.open(file) as opened:
            image = opened.convert("RGB")
            if self.resize is not None:
                ratio = self.resize / min(image.size)
                image = image.resize(tuple(round(side * ratio) for side in image.size), image_module.Resampling.BICUBIC)
            if self.crop is not None:
                left, top = ((side - self.crop) // 2 for side in image.size)
                image = image.crop((left, top, left + self.crop, top + self.crop))
            return torch.from_numpy(np.array(image))


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise WorkloadError("pictures need Pillow", fix="pip install pillow") from error
    return Image
