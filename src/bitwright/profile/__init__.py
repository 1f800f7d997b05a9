"""profile(): measure this device: operators where they stand, casts, optimizers, the host, collectives."""

from bitwright.profile.device import DeviceProfile
from bitwright.profile.halves import halves
from bitwright.profile.kernel_speed import KernelSpeed, kernel_speeds
from bitwright.profile.record import record_step
from bitwright.profile.run import open_store, profile
from bitwright.profile.step import StepSettings, TrainingStep
from bitwright.profile.stepgraph import StepGraph
from bitwright.profile.store import SampleStore
from bitwright.profile.sweep import Variant
from bitwright.profile.way import IMPLEMENTATIONS, Cast, Implementation, OperatorUnderPlan, Way

__all__ = [
    "IMPLEMENTATIONS",
    "Cast",
    "DeviceProfile",
    "Implementation",
    "KernelSpeed",
    "OperatorUnderPlan",
    "SampleStore",
    "StepGraph",
    "StepSettings",
    "TrainingStep",
    "Variant",
    "Way",
    "halves",
    "kernel_speeds",
    "open_store",
    "profile",
    "record_step",
]
