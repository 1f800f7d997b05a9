"""What runtimes that read ONNX files share: how to look into our artefacts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

from numpy.typing import NDArray
from torch import Tensor, nn

from bitwright.core.files import scratch_folder
from bitwright.deploy.agreement import as_array
from bitwright.deploy.export import export, export_float
from bitwright.deploy.integrity import Damage, compare_digests, onnx_tensors, read_digests, structure_damages
from bitwright.deploy.onnx_files import load_onnx, save_onnx, stored_bytes
from bitwright.deploy.runtimes.base import Runtime


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

    def array(self, tensor: Tensor) -> NDArray[Any]:
        """`export` writes float32 whatever float type the model has."""
        return as_array(tensor.float() if tensor.is_floating_point() else tensor)

    @classmethod
    def size(cls, path: Path) -> int:
        """The file, and the tensors that a large model has beside it."""
        return stored_bytes(path)

    @classmethod
    def stored(cls, path: Path) -> dict[str, NDArray[Any]]:
        """The file's constants: `export` names them by site."""
        values = load_onnx(path).graph.initializers.items()
        return {name: value.const_value.numpy() for name, value in values if value.const_value is not None}

    @classmethod
    def damages(cls, path: Path) -> list[Damage]:
        """All constants of the file, and its operators."""
        model = load_onnx(path)
        return [*compare_digests(read_digests(model), onnx_tensors(model)), *structure_damages(model)]

    @classmethod
    def has_digests(cls, path: Path) -> bool:
        """Files of other tools, and of earlier versions, have none."""
        return bool(read_digests(load_onnx(path)))

    @classmethod
    def probing(cls, path: Path, sites: Iterable[str]) -> Runtime:
        """A copy that also returns what its QuantizeLinear nodes give: integers, so fusions can stay as they are."""
        model = load_onnx(path)
        wanted = {f"{site}.codes" for site in sites}
        for node in model.graph:
            value = node.outputs[0]
            if node.op_type == "QuantizeLinear" and value.name in wanted:
                zero_point = node.inputs[2]
                assert zero_point is not None and zero_point.dtype is not None  # we wrote it
                value.dtype = zero_point.dtype
                model.graph.outputs.append(value)
        with scratch_folder() as folder:  # a runtime may still map the file
            opened = folder / "probe.onnx"
            save_onnx(model, opened)
            return cls(opened)
