"""The built-in tables, registered as a plugin would register its own."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from bitwright.backends.table import BackendTable, load_table


@cache
def _table(name: str) -> BackendTable:
    return load_table(Path(__file__).parent / f"{name}.yaml")


def onnxruntime() -> BackendTable:
    """ONNX Runtime on CPUs."""
    return _table("onnxruntime")


def openvino() -> BackendTable:
    """OpenVINO on CPUs."""
    return _table("openvino")


def tensorrt() -> BackendTable:
    """NVIDIA TensorRT."""
    return _table("tensorrt")


def academic() -> BackendTable:
    """What papers do: only the inputs and weights of convolutions and linears."""
    return _table("academic")
