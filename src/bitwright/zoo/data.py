"""Data sets: images of the user's data folder, and pairs of texts.

The environment variable ``BITWRIGHT_DATA`` names the data folder. It contains ``cifar10/`` (``test.npz``,
``train25k.npz``: ``images`` uint8 NHWC and ``labels``) and ``imagenet-val/`` (``images/NNNN_CCCC.jpg``: image number
and class, 224x224), each with its model's ``*.safetensors``, and ``fashion-mnist/`` (gzipped IDX files).

Pairs of texts are encoded as token ids and segment ids. Segments mark the words that both texts have. One task needs no
download: are two passages near-duplicates? scikit-learn includes descriptions of its data sets: 5,300 words of real
text. A pair consists of two passages of the same text that start a few words apart. They are near-duplicates if they
share half of their words.
"""

from __future__ import annotations

import os
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from math import prod
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from bitwright.core.documents import gunzip, npz_names, read_bytes, read_npz, read_picture, read_tensors
from bitwright.core.environment import DATA_VARIABLE
from bitwright.core.errors import WorkloadError

__all__ = [
    "MATCHED",
    "Augmented",
    "Images",
    "Pairs",
    "Vocabulary",
    "Words",
    "data_folder",
    "description_pairs",
    "encode_pairs",
    "existing",
    "idx_images",
    "image_folder",
    "load_weights",
    "npz_images",
    "split_words",
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


MATCHED = 2  # added to the segment (0 or 1) of a word that also occurs in the other text
_WORD = re.compile(r"\w+|[^\w\s]")
_UNKNOWN, _START, _END = 1, 2, 3
_PASSAGE, _APART = 16, 24  # words per passage; the largest distance between two passages
_BLOCK = 48  # words; both passages of a pair are in one block
_PARTS = {"training": (0, 2), "held-out": (1,), "test": (3,)}  # of every four blocks
_COUNTS = {"training": 1600, "held-out": 320, "test": 320}  # pairs
Part = Literal["training", "held-out", "test"]


class Vocabulary(Protocol):
    """Splits a text into words with their tokens. Token 0 is padding."""

    @property
    def size(self) -> int:
        """The number of tokens, including special ones."""

    @property
    def start(self) -> int:
        """The token before the first text."""

    @property
    def end(self) -> int:
        """The token after each text."""

    def words(self, text: str) -> list[tuple[str, tuple[int, ...]]]:
        """Each word in lower case, with its tokens."""


@dataclass(frozen=True)
class Words:
    """One token per word, and one for all unknown words."""

    tokens: dict[str, int]
    start: int = _START
    end: int = _END

    @property
    def size(self) -> int:
        """The number of tokens, including special ones."""
        return len(self.tokens) + 4

    @classmethod
    def learn(cls, texts: Iterable[str], *, least: int = 3) -> Words:
        """The words that occur at least `least` times, the most frequent first.

        >>> Words.learn(["a rose is a rose", "A nose"], least=2).tokens
        {'a': 4, 'rose': 5}
        """
        counts = Counter(word for text in texts for word in split_words(text))
        # Words of equal frequency are sorted, so that tokens are reproducible.
        ranked = sorted((word for word in counts if counts[word] >= least), key=lambda word: (-counts[word], word))
        return cls({word: index for index, word in enumerate(ranked, start=4)})

    def words(self, text: str) -> list[tuple[str, tuple[int, ...]]]:
        """Each word in lower case, with its token."""
        return [(word, (self.tokens.get(word, _UNKNOWN),)) for word in split_words(text)]


def split_words(text: str) -> list[str]:
    """The words and punctuation marks of a text, in lower case."""
    return _WORD.findall(text.lower())


def encode_pairs(vocabulary: Vocabulary, pairs: Sequence[tuple[str, str]], length: int) -> tuple[Tensor, Tensor]:
    """Token and segment ids (N, length) of: start, first text, end, second text, end, padding.

    A few thousand pairs are not enough for a network to learn to compare two texts. So the segments state which words
    the texts share.
    """
    tokens = torch.zeros(len(pairs), length, dtype=torch.int64)
    segments = torch.zeros_like(tokens)
    for row, pair in enumerate(pairs):
        first, second = (vocabulary.words(text) for text in pair)
        sides = [_marked(first, second, 0), _marked(second, first, 1)]
        while sum(map(len, sides)) > length - 3:  # truncate the longer text
            max(sides, key=len).pop()
        ends = (vocabulary.end, 0), (vocabulary.end, 1)
        whole = torch.tensor([(vocabulary.start, 0), *sides[0], ends[0], *sides[1], ends[1]])
        tokens[row, : len(whole)], segments[row, : len(whole)] = whole.T
    return tokens, segments


def _marked(
    words: list[tuple[str, tuple[int, ...]]], others: list[tuple[str, tuple[int, ...]]], segment: int
) -> list[tuple[int, int]]:
    shared = {word for word, _ in others}
    return [(token, segment + MATCHED * (word in shared)) for word, ids in words for token in ids]


class Pairs:
    """Training pairs. The two texts are swapped at random, which doesn't change the label.

    A data set for `Workload(training=..., collate=whole)`: it returns complete batches.
    """

    def __init__(
        self, vocabulary: Vocabulary, pairs: Sequence[tuple[str, str]], labels: Sequence[int], length: int
    ) -> None:
        self.straight = encode_pairs(vocabulary, pairs, length)
        self.swapped = encode_pairs(vocabulary, [(second, first) for first, second in pairs], length)
        self.labels = torch.tensor(labels)

    def __len__(self) -> int:
        """The number of pairs."""
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """One pair and its label."""
        (tokens, segments), labels = self.__getitems__([index])
        return (tokens[0], segments[0]), labels[0]

    def __getitems__(self, indices: list[int]) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """A batch of pairs and labels."""
        swap = torch.rand(len(indices), 1) < 0.5
        ways = zip(self.straight, self.swapped, strict=True)
        tokens, segments = (torch.where(swap, other[indices], one[indices]) for one, other in ways)
        return (tokens, segments), self.labels[indices]


def description_pairs(part: Part) -> tuple[list[tuple[str, str]], list[int]]:
    """The pairs of one part, and whether each is a near-duplicate (every second one is).

    The texts are divided into blocks: half for training, a quarter held out for model selection, and a quarter for the
    final test. The parts have no block in common.
    """
    folder = files("sklearn.datasets.descr")
    names = sorted(file.name for file in folder.iterdir() if file.name.endswith(".rst"))
    texts = [(folder / name).read_text(encoding="utf-8").split() for name in names]
    blocks = [own[at : at + _BLOCK] for own in texts for at in range(0, len(own) - _BLOCK + 1, _BLOCK)]
    if len(blocks) < len(_PARTS) + 1:
        raise WorkloadError(
            "this version of scikit-learn doesn't include the descriptions of its data sets",
            value=names,
            fix="use 1.9",
            code="unsupported-version",
        )
    own = [block for index, block in enumerate(blocks) if index % 4 in _PARTS[part]]
    draw = random.Random(part)
    pairs: list[tuple[str, str]] = []
    labels = [index % 2 for index in range(_COUNTS[part])]
    for label in labels:
        block, at = draw.choice(own), draw.randrange(_BLOCK - _PASSAGE - _APART)
        apart = draw.randint(1, _PASSAGE // 2) if label else draw.randint(_PASSAGE // 2 + 1, _APART)
        first, second = (" ".join(block[start : start + _PASSAGE]) for start in (at, at + apart))
        pairs.append((first, second))
    return pairs, labels
