"""Pairs of texts: encode them as token ids and segment ids, and a task without download.

Segments mark the words that both texts have. The task is: are two passages near-duplicates? scikit-learn includes
descriptions of its data sets: 5,300 words of real text. A pair consists of two passages of the same text that start a
few words apart. They are near-duplicates if they share half of their words.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal, Protocol

import torch
from torch import Tensor

from bitwright.core.errors import WorkloadError

__all__ = ["MATCHED", "Pairs", "Vocabulary", "Words", "description_pairs", "encode_pairs", "split_words"]

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
