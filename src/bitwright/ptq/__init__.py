"""Post-training quantization: calibration of ranges, and algorithms that change a model's weights or ranges."""

from bitwright.ptq.calibration import calibrate, find_ranges, settle_ranges, settle_weights
from bitwright.ptq.distributed import ALONE
from bitwright.ptq.step import MEMORY, Data, PtqContext, Step, read_steps, require_rereadable
from bitwright.ptq.step_runner import StepResult, run_steps
from bitwright.workload.data import CalibrationData

__all__ = [
    "ALONE",
    "MEMORY",
    "CalibrationData",
    "Data",
    "PtqContext",
    "Step",
    "StepResult",
    "calibrate",
    "find_ranges",
    "read_steps",
    "require_rereadable",
    "run_steps",
    "settle_ranges",
    "settle_weights",
]
