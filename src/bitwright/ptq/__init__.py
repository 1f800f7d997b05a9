"""Post-training quantization: model-level algorithms, and ranges that move with a training model."""

from bitwright.ptq.calibrate import calibrate, find_ranges
from bitwright.ptq.calibration_data import CalibrationData
from bitwright.ptq.following import settle_ranges
from bitwright.ptq.ranks import ALONE
from bitwright.ptq.run import At, Ran, Watch, run_steps
from bitwright.ptq.step import Step, read_steps
from bitwright.ptq.weights import settle_weights
from bitwright.ptq.work import MEMORY, Data, Work, need_data

__all__ = [
    "ALONE",
    "MEMORY",
    "At",
    "CalibrationData",
    "Data",
    "Ran",
    "Step",
    "Watch",
    "Work",
    "calibrate",
    "find_ranges",
    "need_data",
    "read_steps",
    "run_steps",
    "settle_ranges",
    "settle_weights",
]
