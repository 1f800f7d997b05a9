"""A text task without download: are two passages near-duplicates?

scikit-learn includes descriptions of its data sets: 5,300 words of real text. A pair consists of two passages of the
same text that start a few words apart. They are near-duplicates if they share half of their words.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from bitwright.core.errors import WorkloadError
from bitwright.workload import Workload
from bitwright.zoo.blendcnn import BlendCNN
from bitwright.zoo.data import load_weights, whole
from bitwright.zoo.scores import scores
from bitwright.zoo.text import Pairs, Words, encode_pairs

__all__ = ["blendcnn_descriptions", "description_pairs"]

_PASSAGE, _APART = 16, 24  # words per passage; the largest distance between two passages
_BLOCK = 48  # words; both passages of a pair are in one block
_LENGTH, _BATCH = 64, 32
_PARTS = {"training": (0, 2), "held-out": (1,), "test": (3,)}  # of every four blocks
_COUNTS = {"training": 1600, "held-out": 320, "test": 320}  # pairs
Part = Literal["training", "held-out", "test"]


def blendcnn_descriptions(*, weights: Path | None = None, judge: Literal["held-out", "test"] = "test") -> Workload:
    """A narrow BlendCNN, untrained or with the `weights` of a run.

    The texts are divided into blocks: half for training, a quarter for model selection (``judge="held-out"``), and a
    quarter for the final test (``judge="test"``). The parts have no block in common.
    """
    training, targets = description_pairs("training")
    judged, labels = description_pairs(judge)
    vocabulary = Words.learn((text for pair in training for text in pair), least=30)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = BlendCNN(vocabulary.size, width=32, channels=32, length=_LENGTH).eval()
    if weights is not None:
        load_weights(model, weights)
    tokens, segments = encode_pairs(vocabulary, judged, _LENGTH)

    def evaluation() -> Iterator[tuple[tuple[Tensor, Tensor], Tensor]]:
        inputs = zip(tokens.split(_BATCH), segments.split(_BATCH), strict=True)
        yield from zip(inputs, torch.tensor(labels).split(_BATCH), strict=True)

    def calibration() -> Iterator[tuple[Tensor, Tensor]]:
        ids = encode_pairs(vocabulary, training[: 4 * _BATCH], _LENGTH)
        yield from zip(*(part.split(_BATCH) for part in ids), strict=True)

    return Workload(
        name="blendcnn-descriptions",
        model=model,
        inputs=(tokens[:1], segments[:1]),
        calibration=calibration,
        evaluation=evaluation,
        # Model selection uses plain top-1, so that a tuner can compare two models sample by sample.
        evaluate=(lambda predict: scores(evaluation(), predict)) if judge == "test" else None,
        training=lambda: Pairs(vocabulary, training, targets, _LENGTH),
        collate=whole,
        loss=F.cross_entropy,
    )


def description_pairs(part: Part) -> tuple[list[tuple[str, str]], list[int]]:
    """The pairs of one part, and whether each is a near-duplicate (every second one is)."""
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
