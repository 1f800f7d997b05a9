"""Post-training quantization: model-level algorithms, and ranges that move with a training model."""

from bitwright.ptq.calibrate import calibrate
from bitwright.ptq.following import settle_ranges
from bitwright.ptq.weights import settle_weights

__all__ = ["calibrate", "settle_ranges", "settle_weights"]
