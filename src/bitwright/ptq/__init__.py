"""Post-training quantization: calibration of ranges, and algorithms that change a model's weights or ranges."""

from bitwright.ptq.calibration import calibrate, find_ranges, settle_ranges, settle_weights
from bitwright.ptq.calibration_data import CalibrationData
from bitwright.ptq.distributed import ALONE
from bitwright.ptq.run import At, Ran, Watch, run_steps
from bitwright.ptq.step import MEMORY, Data, Step, Work, need_data, read_steps

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
