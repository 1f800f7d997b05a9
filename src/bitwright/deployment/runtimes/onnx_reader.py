"""The base class of runtimes that read ONNX files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

from numpy.typing import NDArray
from torch import Tensor, nn

from bitwright.core.files import scratch_folder
from bitwright.deployment.agreement import as_array
from bitwright.deployment.export import export, export_float
from bitwright.deployment.integrity import Damage, compare_digests, onnx_tensors, read_digests, structure_damages
from bitwright.deployment.onnx_files import load_onnx, save_onnx, stored_bytes
from bitwright.deployment.runtimes.base import Runtime


class OnnxReader(Runtime):
    """A runtime that runs the QDQ ONNX file written by `export`."""

    suffix: ClassVar[str] = ".onnx"

    @classmethod
    def write(cls, model: nn.Module, path: Path, inputs: Any) -> None:
        """Write QDQ ONNX, with a dynamic batch if the model's code allows it."""
        export(model, path, inputs)

    @classmethod
    def write_float(cls, model: nn.Module, path: Path, inputs: Any) -> None:
        """Write the float model as ONNX."""
        export_float(model, path, inputs)

    def array(self, tensor: Tensor) -> NDArray[Any]:
        """Convert floats to float32, which `export` always uses."""
        return as_array(tensor.float() if tensor.is_floating_point() else tensor)

    @classmethod
    def size(cls, path: Path) -> int:
        """The size of the file and its external data."""
        return stored_bytes(path)

    @classmethod
    def stored(cls, path: Path) -> dict[str, NDArray[Any]]:
        """The constants of the file, which `export` names by site."""
        values = load_onnx(path).graph.initializers.items()
        return {name: value.const_value.numpy() for name, value in values if value.const_value is not None}

    @classmethod
    def damages(cls, path: Path) -> list[Damage]:
        """Check all constants and operators of the file."""
        model = load_onnx(path)
        return [*compare_digests(read_digests(model), onnx_tensors(model)), *structure_damages(model)]

    @classmethod
    def has_digests(cls, path: Path) -> bool:
        """Files of other tools and earlier versions have no digests."""
        return bool(read_digests(load_onnx(path)))

    @classmethod
    def probing(cls, path: Path, sites: Iterable[str]) -> Runtime:
        """Open a copy with the integer outputs of its QuantizeLinear nodes, which doesn't prevent fusions."""
        model = load_onnx(path)
        wanted = {f"{site}.codes" for site in sites}
        for node in model.graph:
            value = node.outputs[0]
            if node.op_type == "QuantizeLinear" and value.name in wanted:
                zero_point = node.inputs[2]
                assert zero_point is not None and zero_point.dtype is not None  # guaranteed by `export`
                value.dtype = zero_point.dtype
                model.graph.outputs.append(value)
        with scratch_folder() as folder:  # the runtime may keep the file mapped
            opened = folder / "probe.onnx"
            save_onnx(model, opened)
            return cls(opened)
