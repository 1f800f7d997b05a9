"""ExecuTorch with the XNNPACK delegate: integer kernels for mobile and desktop CPUs."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from bitwright.core.errors import ExportError
from bitwright.core.files import replacing, scratch_folder
from bitwright.deployment import exported_program as program_file
from bitwright.deployment.exported_program import QuantizedProgram, quantized_program
from bitwright.deployment.onnx_files import Damage
from bitwright.deployment.runtimes.base import Runtime, input_error


class ExecuTorch(Runtime):
    """Runs .pte files. A .pte has no sites, so the program that it was made from (.pt2) is stored next to it."""

    name = "executorch"
    suffix: ClassVar[str] = ".pte"
    any_batch = False
    activations = "int8/tensor/asym"

    @staticmethod
    def missing() -> str | None:
        return None if find_spec("executorch") else "the package executorch is not installed"

    @classmethod
    def write(cls, model: nn.Module, path: Path, inputs: Any) -> None:
        """Write the program lowered to XNNPACK; convolutions and linear operators in float are an error."""
        quantized = quantized_program(model, inputs)
        _lower(quantized.program, path, integer=True)
        program_file.save_program(_program_path(path), quantized.program, quantized, beside=path)

    @classmethod
    def write_float(cls, model: nn.Module, path: Path, inputs: Any) -> None:
        """Write the float program lowered to XNNPACK."""
        program = program_file.float_program(model, inputs)
        _lower(program, path, integer=False)
        program_file.save_program(_program_path(path), program)

    def __init__(self, path: Path, *, threads: int | None = None) -> None:
        with _quiet():
            from executorch.extension.pybindings import portable_lib
            from executorch.runtime import Runtime as Engine

            if threads is not None:
                portable_lib._unsafe_reset_threadpool(threads)  # there is one pool per process
            self.method = Engine.get().load_program(path).load_method("forward")
        program, _ = program_file.load_program(_program_path(path))
        self.path = path
        self.inputs = program_file.input_names(program)
        self.outputs = tuple(f"output_{index}" for index in range(self.method.metadata.num_outputs()))
        self.batch = program_file.example_batch(program)

    def run(self, feed: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """Run once."""
        tensors = [torch.from_numpy(np.ascontiguousarray(feed[name])) for name in self.inputs]
        try:
            results = self.method.execute(tensors)
        except Exception as error:
            reason: Exception = error
            if self.batch is not None and any(len(tensor) != self.batch for tensor in tensors if tensor.dim()):
                # the engine only says that an argument is invalid
                reason = ValueError(f"the batch is {len(tensors[0])}, but the artefact's is {self.batch}")
            raise input_error(self.name, reason) from error
        return [result.numpy().copy() for result in results]  # the engine owns the buffers

    def executed(self) -> dict[str, int]:
        """The operators in the delegate; `write` rejects products outside of it."""
        program, quantized = program_file.load_program(_program_path(self.path))
        products = sum(_is_product(node) for node in program.graph.nodes)
        integer = 0 if quantized is None else sum(_is_product(n) and _integer(n) for n in program.graph.nodes)
        return {"int8": integer, "float": products - integer}

    def left_in_float(self) -> tuple[str, ...] | None:
        """Operators of a program have no module names."""
        return None if self.executed()["float"] else ()

    @classmethod
    def stored(cls, path: Path) -> dict[str, NDArray[Any]]:
        """The tensors of the program next to the artefact."""
        return program_file.stored_in(program_file.load_quantized(_program_path(path)))

    @classmethod
    def damages(cls, path: Path) -> list[Damage]:
        """Check the digests in the program's file."""
        return program_file.damages_of(_program_path(path))

    @classmethod
    def probing(cls, path: Path, sites: Iterable[str]) -> Runtime:
        """Lower a program with additional outputs."""
        return _ExecuTorchProbe.of(program_file.load_quantized(_program_path(path)), sites)


class _ExecuTorchProbe(ExecuTorch):
    """Returns dequantized values of sites, because XNNPACK's delegate can't end in integers."""

    grids: dict[str, NDArray[Any]]

    @classmethod
    def of(cls, quantized: QuantizedProgram, sites: Iterable[str]) -> _ExecuTorchProbe:
        module, outputs = program_file.flat_module(quantized.program, quantized, sites, dequantized=True)
        example = program_file.flat_example(quantized.program)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(module, example, strict=False)
        with scratch_folder() as folder:
            path = folder / "probe.pte"
            _lower(program, path, integer=True)
            program_file.save_program(_program_path(path), program)
            probe = cls(path)
        probe.inputs = program_file.input_names(quantized.program)
        probe.outputs = outputs
        probe.grids = program_file.stored_in(quantized)
        return probe

    def run(self, feed: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """Run once, and convert values of sites to codes."""
        return [self._codes(name, array) for name, array in zip(self.outputs, super().run(feed), strict=True)]

    def _codes(self, name: str, array: NDArray[Any]) -> NDArray[Any]:
        site = name.removesuffix(".codes")
        if site == name:
            return array
        codes: NDArray[Any] = np.rint(array / self.grids[f"{site}.scale"]) + self.grids[f"{site}.zero_point"]
        return codes.astype(np.int32)


def _program_path(path: Path) -> Path:
    return path.with_suffix(".pt2")


_PRODUCTS = ("conv1d", "conv2d", "conv3d", "convolution", "linear", "addmm", "mm", "bmm", "matmul")


def _is_product(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "_opname", "") in _PRODUCTS


def _integer(node: torch.fx.Node) -> bool:
    return all("dequantize" in str(source.target) for source in node.all_input_nodes[:2])


def _lower(program: torch.export.ExportedProgram, path: Path, *, integer: bool) -> None:
    with _quiet():
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

        lowered = to_edge_transform_and_lower(
            program,
            partitioner=[XnnpackPartitioner()],
            compile_config=EdgeCompileConfig(_check_ir_validity=False),
        )
        left = Counter(
            str(getattr(node.target, "_name", node.target)).removeprefix("aten::").removeprefix("aten.")
            for node in lowered.exported_program().graph.nodes
            if node.op == "call_function" and "delegate" not in str(node.target) and "getitem" not in str(node.target)
        )
        outside = {kind: count for kind, count in left.items() if kind.split(".")[0] in _PRODUCTS}
        if integer and outside:
            raise ExportError(
                "XNNPACK would run these operators in float",
                value=", ".join(f"{count} {kind}" for kind, count in outside.items()),
                fix="use a plan with signed 8-bit activations and a quantized output after each of them",
                code="operators-in-float",
            )
        with replacing(path) as temporary:
            temporary.write_bytes(lowered.to_executorch().buffer)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress developer messages of imports and lowering."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
