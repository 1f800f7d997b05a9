"""Predict the time and memory of training steps on a cluster, and plan precisions and batches for it."""

from bitwright.cluster.cluster import Cluster, DeviceKind, Link, Nodes
from bitwright.cluster.data_parallel import Bucket, make_buckets
from bitwright.cluster.device_step import DeviceStep
from bitwright.cluster.memory import MemoryLimit, MemoryUse
from bitwright.cluster.prediction import DevicePrediction, Prediction, trace_events, write_trace
from bitwright.cluster.predictor import Modelled, Predictor, predict_step
from bitwright.cluster.simulation import Disruptions, Policy, Simulation, simulate_training

__all__ = [
    "Bucket",
    "Cluster",
    "DeviceKind",
    "DevicePrediction",
    "DeviceStep",
    "Disruptions",
    "Link",
    "MemoryLimit",
    "MemoryUse",
    "Modelled",
    "Nodes",
    "Policy",
    "Prediction",
    "Predictor",
    "Simulation",
    "make_buckets",
    "predict_step",
    "simulate_training",
    "trace_events",
    "write_trace",
]
