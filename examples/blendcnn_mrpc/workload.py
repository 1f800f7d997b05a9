"""The workloads of this example: BlendCNN on MRPC, and on texts that scikit-learn ships.

Each task has two workloads. `*_choose` is for training and tuning: it evaluates on pairs held out of the training data.
The other one is for the final benchmark: it evaluates on pairs that influenced no choice. BLENDCNN_FLOAT names the
training run that the weights come from.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from blendcnn import BlendCNN, scores
from mrpc import blendcnn_mrpc
from torch import Tensor

from bitwright import Workload
from bitwright.core.errors import WorkloadError
from bitwright.deployment.checkpoint import checkpoint_file
from bitwright.zoo.data import Pairs, Words, description_pairs, encode_pairs, load_weights, whole

RUN = "BLENDCNN_FLOAT"
EMBEDDINGS = os.environ.get("BLENDCNN_EMBEDDINGS", "words")  # or minilm
_LENGTH, _BATCH = 64, 32


def _trained() -> Path | None:
    """The weights of the float run; None before training."""
    run = os.environ.get(RUN)
    return checkpoint_file(Path(run)) if run else None


def _required() -> Path:
    weights = _trained()
    if weights is None:
        raise WorkloadError(
            "the benchmark needs trained weights",
            fix=f"set {RUN} to the folder of the float run",
            code="weights-required",
        )
    return weights


def mrpc_choose() -> Workload:
    """For training and tuning: evaluated on a tenth of the training pairs."""
    return blendcnn_mrpc(weights=_trained(), judge="held-out", embeddings=EMBEDDINGS)


def mrpc() -> Workload:
    """For the benchmark: evaluated on dev."""
    return blendcnn_mrpc(weights=_required(), judge="dev", embeddings=EMBEDDINGS)


def mrpc_test() -> Workload:
    """For the benchmark on the test pairs, if you have their labels (mrpc/test_labelled.tsv)."""
    return blendcnn_mrpc(weights=_required(), judge="test", embeddings=EMBEDDINGS)


def descriptions_choose() -> Workload:
    """For training and tuning, without a data folder."""
    return blendcnn_descriptions(weights=_trained(), judge="held-out")


def descriptions() -> Workload:
    """For the benchmark, without a data folder."""
    return blendcnn_descriptions(weights=_required(), judge="test")


def blendcnn_descriptions(*, weights: Path | None = None, judge: Literal["held-out", "test"] = "test") -> Workload:
    """A narrow BlendCNN on near-duplicates of scikit-learn's texts, untrained or with the `weights` of a run.

    Model selection uses ``judge="held-out"``, the final result ``judge="test"``.
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
