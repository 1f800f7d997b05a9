"""ONNX Runtime, CPU execution provider."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from bitwright.deploy.onnx_reader import OnnxReader
from bitwright.deploy.runtime import refused


class OnnxRuntime(OnnxReader):
    """Runs ONNX files; all graph optimizations on, as in deployment."""

    name = "onnxruntime"

    @staticmethod
    def missing() -> str | None:
        """Whether the package is there."""
        return None if find_spec("onnxruntime") else "the package onnxruntime is not installed"

    def __init__(self, path: Path, *, threads: int | None = None) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        if threads is not None:
            options.intra_op_num_threads = threads
        self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.inputs = tuple(value.name for value in self.session.get_inputs())
        self.outputs = tuple(value.name for value in self.session.get_outputs())

    def run(self, feed: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """Run once."""
        try:
            results: list[NDArray[Any]] = self.session.run(None, feed)
        except Exception as error:
            raise refused(self.name, error) from error
        return results
