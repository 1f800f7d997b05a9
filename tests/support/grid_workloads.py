"""Small workloads for grids: digits, a narrow network, few images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

from bitwright import Workload
from bitwright.zoo.workloads import DigitsNet, digits_split

FILE = Path(__file__)


def tiny() -> Workload:
    split = digits_split()
    images, labels = split.train_images[:512], split.train_labels[:512]
    return Workload(
        name="tiny",
        model=DigitsNet(width=8),
        inputs=(split.test_images[:1],),
        calibration=lambda: images[:64].split(64),
        evaluation=lambda: [(split.test_images[:250], split.test_labels[:250])],
        training=lambda: TensorDataset(images, labels),
        loss=F.cross_entropy,
    )


def flaky() -> Workload:
    """The loss raises in the first training with quantizers, and never again."""
    return replace(tiny(), loss=_fail_once)


def broken() -> Workload:
    """The loss raises in every training with quantizers."""
    return replace(tiny(), loss=_fail_always)


_failed: list[Any] = []


def _fail_once(output: Tensor, target: Tensor) -> Tensor:
    if not _failed:
        _failed.append(1)
        raise RuntimeError("the first time goes wrong")
    return F.cross_entropy(output, target)


def _fail_always(output: Tensor, target: Tensor) -> Tensor:
    raise RuntimeError("it always goes wrong")


def algorithm(name: str) -> dict[str, str]:
    """With ranges that are quickly found."""
    return {"a_method": name, "observer": "minmax", "weight_observer": "minmax"}


def grid(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "bitwright-grid": 1,
        "name": "small",
        "models": [f"{FILE}:tiny"],
        "algorithms": [algorithm("lsq")],
        "backends": ["academic"],
        "bits": [4],
        "start": {"epochs": 5, "batch": 32, "optimizer": "adamw", "lr": 0.01},
        "training": {"epochs": 1, "batch": 128, "optimizer": "adamw", "lr": 0.001},
        "store": str(folder / "grid.db"),
        **changes,
    }
