"""Encode pairs of texts as token ids and segment ids. Segments mark the words that both texts have."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from bitwright.core.errors import WorkloadError

__all__ = ["MATCHED", "Pairs", "Vocabulary", "WordPieces", "Words", "encode_pairs"]

MATCHED = 2  # added to the segment (0 or 1) of a word that also occurs in the other text
_WORD = re.compile(r"\w+|[^\w\s]")
_UNKNOWN, _START, _END = 1, 2, 3


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
        counts = Counter(word for text in texts for word in _split(text))
        # Words of equal frequency are sorted, so that tokens are reproducible.
        ranked = sorted((word for word in counts if counts[word] >= least), key=lambda word: (-counts[word], word))
        return cls({word: index for index, word in enumerate(ranked, start=4)})

    def words(self, text: str) -> list[tuple[str, tuple[int, ...]]]:
        """Each word in lower case, with its token."""
        return [(word, (self.tokens.get(word, _UNKNOWN),)) for word in _split(text)]


class WordPieces:
    """The word pieces of a BERT-like model's `tokenizer.json`."""

    def __init__(self, file: Path) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise WorkloadError(
                "the package tokenizers is required", fix='pip install "bitwright[examples]"', code="missing-package"
            ) from error
        self._tokenizer = Tokenizer.from_file(str(file))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.size: int = self._tokenizer.get_vocab_size()
        self.start, self.end = (_known(self._tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]"))

    def words(self, text: str) -> list[tuple[str, tuple[int, ...]]]:
        """Each word in lower case, with its pieces."""
        words = _split(text)
        coded = self._tokenizer.encode_batch(words, add_special_tokens=False)
        return [(word, tuple(code.ids)) for word, code in zip(words, coded, strict=True)]


def _known(token: int | None) -> int:
    if token is None:
        raise WorkloadError(
            "the tokenizer has no [CLS] and [SEP]", fix="use a BERT-like tokenizer", code="invalid-tokenizer"
        )
    return token


def _split(text: str) -> list[str]:
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
