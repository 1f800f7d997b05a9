"""predict(): the step time and memory of a plan on a cluster, by replaying what was measured."""

from bitwright.predict.buckets import Bucket, make_buckets
from bitwright.predict.cluster import Cluster, DeviceKind, Link
from bitwright.predict.limit import MemoryLimit
from bitwright.predict.local import Local
from bitwright.predict.memory import MemoryUse
from bitwright.predict.prediction import DevicePrediction, Prediction
from bitwright.predict.predictor import Modelled, Predictor, predict
from bitwright.predict.trace import trace_events, write_trace

__all__ = [
    "Bucket",
    "Cluster",
    "DeviceKind",
    "DevicePrediction",
    "Link",
    "Local",
    "MemoryLimit",
    "MemoryUse",
    "Modelled",
    "Prediction",
    "Predictor",
    "make_buckets",
    "predict",
    "trace_events",
    "write_trace",
]
