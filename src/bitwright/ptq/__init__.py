"""Post-training quantization: model-level algorithms. First of them: calibrate()."""

from bitwright.ptq.calibrate import calibrate

__all__ = ["calibrate"]
