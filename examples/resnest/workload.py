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
from bitwright.core.documents import read_tensors
from bitwright.core.errors import PlanError, WorkloadError
from bitwright.deployment.checkpoint import checkpoint_file
from bitwright.importers.lpot.workload import LpotData
from bitwright.zoo import ResNeSt, resnest50


def _data() -> LpotData:
    found = os.environ.get("RESNEST_CONFIG")
    if not found:
        what, fix = "the LPOT file is not named", "set RESNEST_CONFIG, or use run.sh --config FILE"
        raise WorkloadError(what, where="RESNEST_CONFIG", fix=fix, code="config-required")
    data = TuneConfig.load(found).data
    if not isinstance(data, LpotData):
        what, fix = "the file has no data", "name a file of LPOT"
        raise WorkloadError(what, where="RESNEST_CONFIG", value=found, fix=fix, code="config-required")
    return data


def _weights(named: str) -> dict[str, Tensor]:
    path = Path(named)
    if path.suffix == ".pth":
        loaded: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
        return loaded
    return read_tensors(checkpoint_file(path) if path.is_dir() else path, fix="name the weights of this model")


def _workload(name: str) -> Workload:
    data = _data()
    sources, problems = data.open(None)
    if problems:
        raise PlanError(problems, title="the data of the LPOT file has problems")
    loaders = {role: data.config.loaders.get(role) for role in ("calibration", "evaluation")}
    roots = {role: getattr(loader.dataset[0], "root", None) for role, loader in loaders.items() if loader}
    if None in (roots.get("calibration"), roots.get("evaluation")):
        what, fix = "the file has no image folders", "add ImageFolder for calibration and evaluation"
        raise WorkloadError(what, where="RESNEST_CONFIG", fix=fix, code="config-required")
    calibration, evaluation = sources["calibration"], sources["evaluation"]
    training = evaluation.loader.model_copy(update={"dataset": calibration.loader.dataset}).open(calibration.seed)
    classes = sum(path.is_dir() for path in Path(roots["calibration"]).iterdir())
    first = next(iter(evaluation.inputs()))
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
        parts = list(training.epoch())
        return TensorDataset(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))

    return Workload(
        name=name,
        model=model.eval(),
        inputs=(torch.zeros_like(first[:1]),),
        calibration=calibration.inputs,
        evaluation=evaluation.epoch,
        training=samples,
        loss=F.cross_entropy,
    )


def narrow() -> Workload:
    """A ResNeSt with three blocks and a quarter of the channels."""
    return _workload("narrow")


def full() -> Workload:
    """ResNeSt-50."""
    return _workload("resnest50")
