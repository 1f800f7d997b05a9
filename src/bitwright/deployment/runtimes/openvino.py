"""OpenVINO, CPU plugin."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.deployment.onnx_files import load_onnx, operator_of
from bitwright.deployment.runtimes.base import OnnxReader, input_error
from bitwright.deployment.runtimes.decoding import layout_of_inputs

_PRODUCTS = {"Convolution", "GroupConvolution", "Deconvolution", "FullyConnected", "MatMul"}


@cache
def _core() -> Any:
    """One core for the whole process, which is never released.

    On CPUs with AVX-512 each core's plugin sets an alternate signal stack for the thread, and restores the previous one
    when it is destroyed. With several cores that stack may already be freed, and the next signal (Ctrl-C, the exit of a
    child process) would crash the process.
    """
    import openvino

    return openvino.Core()


def _size(dimension: Any) -> int | None:
    return int(dimension.get_length()) if dimension.is_static else None


class OpenVino(OnnxReader):
    """Runs ONNX files on OpenVINO, with float32 for everything that isn't integer (never bf16)."""

    name = "openvino"

    @staticmethod
    def missing() -> str | None:
        return None if find_spec("openvino") else "the package openvino is not installed"

    def __init__(self, path: Path, *, threads: int | None = None) -> None:
        config: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32"}
        if threads is not None:
            config["INFERENCE_NUM_THREADS"] = threads
        self.path = path
        core = _core()
        self.compiled = core.compile_model(core.read_model(str(path)), "CPU", config)
        self.inputs = tuple(port.any_name for port in self.compiled.inputs)
        self.cache = layout_of_inputs(
            {port.any_name: [_size(size) for size in port.partial_shape] for port in self.compiled.inputs}
        )
        presents = () if self.cache is None else self.cache.presents
        self.outputs = tuple(port.any_name for port in self.compiled.outputs if port.any_name not in presents)
        shapes = [port.partial_shape for port in self.compiled.inputs]
        sizes = [shape[0] for shape in shapes if shape.rank.is_static and len(shape)]
        self.batch = sizes[0].get_length() if sizes and all(size.is_static for size in sizes) else None
        self.request = self.compiled.create_infer_request()

    def run(self, feed: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """Run once."""
        results = self.run_all(feed)
        return [results[name] for name in self.outputs]

    def run_all(self, feed: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """All outputs by name, also those for the cache, which `run` omits."""
        complete = feed if self.cache is None else self.cache.completed(feed, self.inputs)
        try:
            results = self.request.infer(complete)
        except Exception as error:
            raise input_error(self.name, error) from error
        return {port.any_name: np.array(results[port]) for port in self.compiled.outputs}

    def executed(self) -> dict[str, int]:
        """Count the layers of the compiled program by their precision."""
        kinds = [integer for _, integer in self._products()]
        return {"int8": sum(kinds), "float": len(kinds) - sum(kinds)}

    def left_in_float(self) -> tuple[str, ...]:
        """The names come from the original values of each layer."""
        ours = {str(node.outputs[0].name): operator_of(node) for node in load_onnx(self.path).graph}
        found = []
        for layer, integer in self._products():
            if not integer:
                values = [name.removesuffix("/WithoutBiases") for name in layer.split(",")]
                found.append(next((ours[value] for value in values if value in ours), values[0]))
        return tuple(dict.fromkeys(found))

    def _products(self) -> Iterator[tuple[str, bool]]:
        """Layers that multiply: the origin of each, and whether it runs in integers."""
        for node in self.compiled.get_runtime_model().get_ordered_ops():
            facts = {key: value.astype(str) for key, value in node.get_rt_info().items()}
            if facts["layerType"] in _PRODUCTS:
                origin = facts["originalLayersNames"] or node.get_friendly_name()
                yield origin, facts["runtimePrecision"] in ("i8", "u8")
