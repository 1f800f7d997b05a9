"""The models of this example: ResNeSt-50, and a narrow ResNeSt that trains in minutes on one core.

RESNEST_CONFIG names the LPOT file: its data sections say where the images are and how large they become.
RESNEST_CHECKPOINT names the weights: a file of the authors' package (.pth), a .safetensors file, or the folder of a
training run.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from bitwright import TuneConfig, Workload
from bitwright.core.arrays import read_tensors
from bitwright.core.errors import WorkloadError
from bitwright.deployment.checkpoint import checkpoint_file
from bitwright.zoo import ResNeSt, resnest50


def _config() -> TuneConfig:
    found = os.environ.get("RESNEST_CONFIG")
    if not found:
        what, fix = "the LPOT file is not named", "set RESNEST_CONFIG, or use run.sh --config FILE"
        raise WorkloadError(what, where="RESNEST_CONFIG", fix=fix, code="config-required")
    return TuneConfig.load(found)


def _weights(named: str) -> dict[str, Tensor]:
    path = Path(named)
    if path.suffix == ".pth":
        loaded: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
        return loaded
    return read_tensors(checkpoint_file(path) if path.is_dir() else path, fix="name the weights of this model")


def _workload(name: str) -> Workload:
    config = _config()
    calibration, evaluation = config.calibration, config.evaluation
    if calibration is None or evaluation is None or calibration.images is None or evaluation.crop is None:
        what, fix = "the file has no image folders", "add ImageFolder with CenterCrop for calibration and evaluation"
        raise WorkloadError(what, where="RESNEST_CONFIG", fix=fix, code="config-required")
    crop, classes = evaluation.crop, sum(path.is_dir() for path in calibration.images.iterdir())
    training = evaluation.model_copy(update={"images": calibration.images})
    named = os.environ.get("RESNEST_CHECKPOINT")
    weights = _weights(named) if named else None
    if weights is None:
        sys.stderr.write(f"{name}: no checkpoint is named, so the weights are untrained\n")
    else:
        classes = len(weights["fc.bias"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = (
            resnest50(classes=classes) if name == "resnest50" else ResNeSt((1, 1, 1), width=16, classes=classes)
        )
    if weights is not None:
        model.load_state_dict(weights, strict=True)

    def samples() -> TensorDataset:
        parts = list(training.labelled())
        return TensorDataset(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))

    return Workload(
        name=name,
        model=model.eval(),
        inputs=(torch.zeros(1, 3, crop, crop),),
        calibration=calibration.inputs,
        evaluation=evaluation.labelled,
        training=samples,
        loss=F.cross_entropy,
    )


def narrow() -> Workload:
    """A ResNeSt with three blocks and a quarter of the channels."""
    return _workload("narrow")


def full() -> Workload:
    """ResNeSt-50."""
    return _workload("resnest50")
