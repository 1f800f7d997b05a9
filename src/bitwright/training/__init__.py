"""Training: the trainer, quantization-aware training in other training loops, and checkpoints."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bitwright.training.adaptive import DriftSettings, Replanner
    from bitwright.training.callbacks import Callback, TensorBoard, tensorboard_problem
    from bitwright.training.config import TrainConfig
    from bitwright.training.qat import Qat, parameter_groups
    from bitwright.training.trainer import Trainer, TrainResult

# Imported on first use: the command line reads the settings of `TrainConfig` without torch.
_HOME = {
    "Callback": "callbacks",
    "TensorBoard": "callbacks",
    "tensorboard_problem": "callbacks",
    "DriftSettings": "adaptive",
    "Replanner": "adaptive",
    "TrainConfig": "config",
    "Qat": "qat",
    "parameter_groups": "qat",
    "Trainer": "trainer",
    "TrainResult": "trainer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


__all__ = [
    "Callback",
    "DriftSettings",
    "Qat",
    "Replanner",
    "TensorBoard",
    "TrainConfig",
    "TrainResult",
    "Trainer",
    "parameter_groups",
    "tensorboard_problem",
]
