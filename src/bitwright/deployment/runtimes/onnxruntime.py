"""ONNX Runtime, CPU execution provider."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.core.files import scratch_folder
from bitwright.deployment.onnx_files import data_files, load_onnx, operator_of, producing_operator
from bitwright.deployment.runtimes.base import OnnxReader, input_error
from bitwright.deployment.runtimes.decoding import layout_of_inputs

_INTEGER = {
    "QLinearConv",
    "QLinearMatMul",
    "QGemm",
    "MatMulIntegerToFloat",
    "DynamicQuantizeMatMul",
    "QLinearConvTranspose",
}
_FLOAT = {"Conv", "FusedConv", "Gemm", "FusedGemm", "MatMul", "FusedMatMul", "ConvTranspose", "NhwcFusedConv"}
_BLOCKED = "_nchwc"  # ONNX Runtime's own layout for float convolutions


class OnnxRuntime(OnnxReader):
    """Runs ONNX files with all graph optimizations, as in deployment."""

    name = "onnxruntime"

    @staticmethod
    def missing() -> str | None:
        return None if find_spec("onnxruntime") else "the package onnxruntime is not installed"

    def __init__(self, path: Path, *, threads: int | None = None, config: Mapping[str, str] | None = None) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        for key, value in (config or {}).items():
            options.add_session_config_entry(key, value)
        if threads is not None:
            options.intra_op_num_threads = threads
        self.path = path
        self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.inputs = tuple(value.name for value in self.session.get_inputs())
        self.cache = layout_of_inputs({value.name: value.shape for value in self.session.get_inputs()})
        presents = () if self.cache is None else self.cache.presents
        self.outputs = tuple(value.name for value in self.session.get_outputs() if value.name not in presents)
        sizes = [value.shape[0] for value in self.session.get_inputs() if value.shape]
        self.batch = sizes[0] if sizes and all(isinstance(size, int) for size in sizes) else None

    def run(self, feed: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """Run once."""
        return self._run(self.outputs, feed)

    def run_all(self, feed: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """All outputs by name, also those for the cache, which `run` omits."""
        if self.cache is not None:
            feed = self.cache.completed(feed, self.inputs)
        names = self.outputs if self.cache is None else (*self.outputs, *self.cache.presents)
        return dict(zip(names, self._run(names, feed), strict=True))

    def _run(self, outputs: Sequence[str], feed: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
        try:
            results: list[NDArray[Any]] = self.session.run(outputs, feed)
        except Exception as error:
            raise input_error(self.name, error) from error
        return results

    def executed(self) -> dict[str, int]:
        """Count the operators in ONNX Runtime's optimized graph."""
        kinds = Counter(node.op_type for node in self._optimized)
        return {
            "int8": sum(count for kind, count in kinds.items() if kind in _INTEGER),
            "float": sum(count for kind, count in kinds.items() if kind in _FLOAT),
        }

    def left_in_float(self) -> tuple[str, ...]:
        """The names come from the weights or sites that operators read."""
        written = load_onnx(self.path).graph
        found = []
        for node in self._optimized:
            if node.op_type in _FLOAT:
                name = str(node.name)
                if name.endswith(_BLOCKED):  # its weights are renamed, and its name is that of the final output
                    found.append(producing_operator(written, name.removesuffix(_BLOCKED), _FLOAT) or name)
                else:
                    found.append(operator_of(node))
        return tuple(dict.fromkeys(found))

    @cached_property
    def _optimized(self) -> ir.Graph:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        with scratch_folder() as folder:
            optimized = folder / "optimized.onnx"
            options.optimized_model_filepath = str(optimized)
            if data_files(self.path):  # too large for one file
                options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "data")
            onnxruntime.InferenceSession(str(self.path), options, providers=["CPUExecutionProvider"])
            return ir.load(optimized).graph
