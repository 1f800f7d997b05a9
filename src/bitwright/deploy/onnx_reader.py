"""What runtimes that read ONNX files share: how to look into our artefacts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import onnx_ir as ir
from numpy.typing import NDArray
from torch import nn

from bitwright.deploy.export import export, export_float
from bitwright.deploy.runtime import Runtime


class OnnxReader(Runtime):
    """A runtime whose artefact is the QDQ ONNX file that `export` writes."""

    suffix: ClassVar[str] = ".onnx"

    @classmethod
    def write(cls, model: nn.Module, path: Path, inputs: Any) -> None:
        """QDQ ONNX; the batch is free where the model's own code lets it be."""
        export(model, path, inputs)

    @classmethod
    def write_float(cls, model: nn.Module, path: Path, inputs: Any) -> None:
        """The float model as ONNX."""
        export_float(model, path, inputs)

    @classmethod
    def stored(cls, path: Path) -> dict[str, NDArray[Any]]:
        """The file's constants: `export` names them by site."""
        values = ir.load(path).graph.initializers.items()
        return {name: value.const_value.numpy() for name, value in values if value.const_value is not None}

    @classmethod
    def probing(cls, path: Path, sites: Iterable[str]) -> Runtime:
        """A copy that also returns what its QuantizeLinear nodes give: integers, so fusions can stay as they are."""
        model = ir.load(path)
        wanted = {f"{site}.codes" for site in sites}
        for node in model.graph:
            value = node.outputs[0]
            if node.op_type == "QuantizeLinear" and value.name in wanted:
                zero_point = node.inputs[2]
                assert zero_point is not None and zero_point.dtype is not None  # we wrote it
                value.dtype = zero_point.dtype
                model.graph.outputs.append(value)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # a runtime may still map the file
            opened = Path(folder) / "probe.onnx"
            ir.save(model, opened)
            return cls(opened)
