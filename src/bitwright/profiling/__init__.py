"""Measure this device within real training steps: operators, casts, optimizers, the host and collectives."""

from bitwright.profiling.device_profile import DeviceProfile
from bitwright.profiling.execution import IMPLEMENTATIONS, Cast, Execution, Implementation, OperatorUnderPlan
from bitwright.profiling.microbenchmarks import KernelSpeed, kernel_speeds
from bitwright.profiling.profiled_step import TimedStep, Variant, halves
from bitwright.profiling.profiler import open_store, profile_variants
from bitwright.profiling.sample_store import SampleStore
from bitwright.profiling.step_graph import StepGraph, record_step
from bitwright.training.config import StepSettings

__all__ = [
    "IMPLEMENTATIONS",
    "Cast",
    "DeviceProfile",
    "Execution",
    "Implementation",
    "KernelSpeed",
    "OperatorUnderPlan",
    "SampleStore",
    "StepGraph",
    "StepSettings",
    "TimedStep",
    "Variant",
    "halves",
    "kernel_speeds",
    "open_store",
    "profile_variants",
    "record_step",
]
