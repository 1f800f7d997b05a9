"""OpenVINO, CPU plugin."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.deploy.onnx_reader import OnnxReader
from bitwright.deploy.runtime import refused

_PRODUCTS = {"Convolution", "GroupConvolution", "Deconvolution", "FullyConnected", "MatMul"}


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
        shapes = [port.partial_shape for port in self.compiled.inputs]
        sizes = [shape[0] for shape in shapes if shape.rank.is_static and len(shape)]
        self.batch = sizes[0].get_length() if sizes and all(size.is_static for size in sizes) else None
        self.request = self.compiled.create_infer_request()

    def run(self, feed: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """Run once."""
        try:
            results = self.request.infer(feed)
        except Exception as error:
            raise refused(self.name, error) from error
        return [np.array(results[port]) for port in self.compiled.outputs]

    def executed(self) -> dict[str, int]:
        """Layers of the program that the CPU plugin compiled, by the precision that it gave them."""
        counts = {"int8": 0, "float": 0}
        for node in self.compiled.get_runtime_model().get_ops():
            facts = node.get_rt_info()
            if facts["layerType"].astype(str) in _PRODUCTS:
                precision = facts["runtimePrecision"].astype(str)
                counts["int8" if precision in ("i8", "u8") else "float"] += 1
        return counts
