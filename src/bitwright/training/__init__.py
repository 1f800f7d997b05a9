"""Training: the trainer, quantization-aware training in other training loops, and checkpoints."""

from bitwright.training.callbacks import Callback, TensorBoard, tensorboard_problem
from bitwright.training.config import TrainConfig
from bitwright.training.qat import Qat, parameter_groups
from bitwright.training.trainer import Trainer, TrainResult

__all__ = [
    "Callback",
    "Qat",
    "TensorBoard",
    "TrainConfig",
    "TrainResult",
    "Trainer",
    "parameter_groups",
    "tensorboard_problem",
]
