"""BlendCNN on MRPC, and on texts that scikit-learn has in it, as the three commands see it.

Each task has two workloads: one to choose by (train, tune: judged on pairs held out of the training data), and one
to report by (bench: judged on pairs that no choice was made on). Weights come from the run that BLENDCNN_FLOAT names.
"""

from __future__ import annotations

import os
from pathlib import Path

from bitwright import Workload
from bitwright.zoo.mrpc import blendcnn_mrpc

EMBEDDINGS = os.environ.get("BLENDCNN_EMBEDDINGS", "words")


def _trained() -> Path | None:
    """The weights of the float run; none before there is one."""
    run = os.environ.get("BLENDCNN_FLOAT")
    file = Path(run) / "checkpoint.safetensors" if run else None
    return file if file is not None and file.is_file() else None


def mrpc_choose() -> Workload:
    """To train and to tune: judged on a tenth of the training pairs."""
    return blendcnn_mrpc(weights=_trained(), judge="held-out", embeddings=EMBEDDINGS)


def mrpc() -> Workload:
    """To report: judged on dev."""
    return blendcnn_mrpc(weights=_trained(), judge="dev", embeddings=EMBEDDINGS)
