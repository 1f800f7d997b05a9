"""OpenVINO, CPU plugin."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.deploy.onnx_reader import OnnxReader
from bitwright.deploy.runtime import refused


class OpenVino(OnnxReader):
    """Runs ONNX files on OpenVINO, with float32 wherever it isn't integer (no bf16 behind the user's back)."""

    name = "openvino"

    @staticmethod
    def missing() -> str | None:
        """Whether the package is there."""
        return None if find_spec("openvino") else "the package openvino is not installed"

    def __init__(self, path: Path, *, threads: int | None = None) -> None:
        import openvino

        config: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32"}
        if threads is not None:
            config["INFERENCE_NUM_THREADS"] = threads
        core = openvino.Core()
        self.compiled = core.compile_model(core.read_model(str(path)), "CPU", config)
        self.inputs = tuple(port.any_name for port in self.compiled.inputs)
        self.outputs = tuple(port.any_name for port in self.compiled.outputs)
        self.request = self.compiled.create_infer_request()

    def run(self, feed: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """Run once."""
        try:
            results = self.request.infer(feed)
        except Exception as error:
            raise refused(self.name, error) from error
        return [np.array(results[port]) for port in self.compiled.outputs]
