"""Training with one flag: the trainer, quantization within other people's loops, checkpoints."""

from bitwright.interrupts import Interrupted
from bitwright.train.callbacks import Callback
from bitwright.train.config import TrainConfig
from bitwright.train.qat import Qat, parameter_groups
from bitwright.train.tensorboard import TensorBoard, tensorboard_problem
from bitwright.train.trainer import Trainer, TrainResult

__all__ = [
    "Callback",
    "Interrupted",
    "Qat",
    "TensorBoard",
    "TrainConfig",
    "TrainResult",
    "Trainer",
    "parameter_groups",
    "tensorboard_problem",
]
