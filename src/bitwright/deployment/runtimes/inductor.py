"""torch's compiler, inductor, on x86 CPUs, with oneDNN's integer kernels."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from logging import CRITICAL
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from bitwright.core.environment import quiet
from bitwright.deployment import exported_program as program_file
from bitwright.deployment.exported_program import quantized_program
from bitwright.deployment.onnx_files import Damage
from bitwright.deployment.runtimes.base import Runtime, input_error
from bitwright.quantizers.compiled import for_this_cpu

# Names of integer and float products in torch's profiler.
_INTEGER = ("onednn::qconv", "onednn::qlinear")
_FLOAT = ("aten::mkldnn_convolution", "mkldnn::_convolution", "aten::addmm", "aten::mm", "aten::bmm", "mkldnn::_linear")


class Inductor(Runtime):
    """Compiles a torch.export program when it is opened: this takes up to a minute, and the result is cached."""

    name = "inductor"
    suffix: ClassVar[str] = ".pt2"
    any_batch = False

    @staticmethod
    def missing() -> str | None:
        """Check for a C++ compiler and oneDNN, which inductor needs."""
        if not torch.backends.mkldnn.is_available():
            return "this torch has no oneDNN"
        if not any(shutil.which(name) for name in ("g++", "clang++", "c++")):
            return "no C++ compiler is installed (g++ or clang++)"
        return None

    @classmethod
    def write(cls, model: nn.Module, path: Path, inputs: Any) -> None:
        """Write a torch.export program with quantize and dequantize operators and integer weights."""
        quantized = quantized_program(model, inputs)
        program_file.save_program(path, quantized.program, quantized)

    @classmethod
    def write_float(cls, model: nn.Module, path: Path, inputs: Any) -> None:
        """Write the float program."""
        program_file.save_program(path, program_file.float_program(model, inputs))

    def __init__(self, path: Path, *, threads: int | None = None, show: Iterable[str] = ()) -> None:
        program, quantized = program_file.load_program(path)
        module, self.outputs = program_file.flat_module(program, quantized, show)
        self.inputs = program_file.input_names(program)
        self.batch = program_file.example_batch(program)
        self.threads = threads
        self.example = program_file.flat_example(program)
        # freezing: inductor packs only frozen constants for integer kernels
        # suppress torch's loggers, because they print tracebacks of errors that are raised anyway
        with self._threads(), warnings.catch_warnings(), quiet("torch", level=CRITICAL):
            warnings.simplefilter("ignore")  # torch's internal warnings
            with torch._inductor.config.patch(freezing=True):
                self.compiled = torch.compile(module, dynamic=False, options=for_this_cpu())
                self._run(self.example)

    def run(self, feed: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """Run once."""
        tensors = tuple(torch.from_numpy(np.ascontiguousarray(feed[name])) for name in self.inputs)
        if self.batch is not None and any(len(tensor) != self.batch for tensor in tensors if tensor.dim()):
            error = ValueError(f"the batch is {len(tensors[0])}, but the artefact's is {self.batch}")
            raise input_error(self.name, error)  # torch would silently recompile
        with self._threads():
            return [result.numpy() for result in self._run(tensors)]

    def _run(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            results: tuple[torch.Tensor, ...] = self.compiled(*tensors)
        return results

    @contextmanager
    def _threads(self) -> Iterator[None]:
        """Set torch's global number of threads temporarily."""
        before = torch.get_num_threads()
        if self.threads in (None, before):
            yield
            return
        torch.set_num_threads(self.threads or before)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def executed(self) -> dict[str, int]:
        """Count the calls in torch's profile of one run."""
        with torch.autograd.profiler_legacy.profile() as profile:  # the newer profiler writes to stderr
            self._run(self.example)
        calls = {event.key: event.count for event in profile.key_averages()}
        return {
            kind: sum(count for key, count in calls.items() if key.startswith(names))
            for kind, names in (("int8", _INTEGER), ("float", _FLOAT))
        }

    def left_in_float(self) -> tuple[str, ...] | None:
        """The profiler counts calls without operator names."""
        return None if self.executed()["float"] else ()

    @classmethod
    def stored(cls, path: Path) -> dict[str, NDArray[Any]]:
        """The tensors of the program."""
        return program_file.stored_in(program_file.load_quantized(path))

    @classmethod
    def damages(cls, path: Path) -> list[Damage]:
        """Check the digests in the program's file."""
        return program_file.damages_of(path)

    @classmethod
    def probing(cls, path: Path, sites: Iterable[str]) -> Runtime:
        """Compile the program with additional outputs."""
        return cls(path, show=sites)
