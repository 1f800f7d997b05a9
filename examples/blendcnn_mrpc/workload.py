"""BlendCNN on MRPC, and on texts that scikit-learn has in it, as the three commands see it.

Each task has two workloads: one to choose by (train, tune: judged on pairs held out of the training data), and one
to report by (bench: judged on pairs that no choice was made on). Weights come from the run that BLENDCNN_FLOAT names.
"""

from __future__ import annotations

import os
from pathlib import Path

from bitwright import Workload
from bitwright.core.errors import WorkloadError
from bitwright.deployment.checkpoint import checkpoint_file
from bitwright.zoo.descriptions import blendcnn_descriptions
from bitwright.zoo.mrpc import blendcnn_mrpc

RUN = "BLENDCNN_FLOAT"
EMBEDDINGS = os.environ.get("BLENDCNN_EMBEDDINGS", "words")  # or minilm


def _trained() -> Path | None:
    """The weights of the float run. Without the variable there are none yet."""
    run = os.environ.get(RUN)
    return checkpoint_file(Path(run)) if run else None


def _needed() -> Path:
    weights = _trained()
    if weights is None:
        raise WorkloadError("an untrained model has nothing to report", fix=f"set {RUN} to the folder of the float run")
    return weights


def mrpc_choose() -> Workload:
    """To train and to tune: judged on a tenth of the training pairs."""
    return blendcnn_mrpc(weights=_trained(), judge="held-out", embeddings=EMBEDDINGS)


def mrpc() -> Workload:
    """To report: judged on dev."""
    return blendcnn_mrpc(weights=_needed(), judge="dev", embeddings=EMBEDDINGS)


def mrpc_test() -> Workload:
    """To report on the test pairs, by those who have their labels (mrpc/test_labelled.tsv)."""
    return blendcnn_mrpc(weights=_needed(), judge="test", embeddings=EMBEDDINGS)


def descriptions_choose() -> Workload:
    """The variant that needs no data: to train and to tune."""
    return blendcnn_descriptions(weights=_trained(), judge="held-out")


def descriptions() -> Workload:
    """The variant that needs no data: to report."""
    return blendcnn_descriptions(weights=_needed(), judge="test")
