"""Post-training quantization: calibration of ranges, and algorithms that change a model's weights or ranges."""

from bitwright.ptq.calibration import calibrate, find_ranges, settle_ranges, settle_weights
from bitwright.ptq.distributed import ALONE
from bitwright.ptq.run import Ran, run_steps
from bitwright.ptq.step import MEMORY, Data, Step, Work, need_data, read_steps
from bitwright.workload.calibration_data import CalibrationData

__all__ = [
    "ALONE",
    "MEMORY",
    "CalibrationData",
    "Data",
    "Ran",
    "Step",
    "Work",
    "calibrate",
    "find_ranges",
    "need_data",
    "read_steps",
    "run_steps",
    "settle_ranges",
    "settle_weights",
]
