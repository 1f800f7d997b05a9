"""The base classes of runtimes: load an artefact, and call it like the model."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bitwright.core.arguments import strict
from bitwright.core.errors import ArtefactError, BitwrightError, Problem
from bitwright.core.files import scratch_folder
from bitwright.core.registry import RUNTIMES
from bitwright.core.tensor_tree import as_array, eval_mode, map_tensors, tensors_in
from bitwright.deployment.onnx_files import (
    Damage,
    compare_digests,
    load_onnx,
    onnx_tensors,
    read_digests,
    save_onnx,
    stored_bytes,
    structure_damages,
)
from bitwright.workload import Workload, call, evaluate
from bitwright.workload.data import in_chunks

if TYPE_CHECKING:
    from bitwright.deployment.measurement import Latency
    from bitwright.deployment.runtimes.decoding import CacheLayout


FOLDER = ""
"""The suffix of artefacts that are folders."""


class Runtime(ABC):
    """A loaded artefact. It is called like the model: with tensors, and it returns a tensor or a tuple of tensors."""

    name: ClassVar[str]
    suffix: ClassVar[str]
    """The suffix of its files."""
    any_batch: ClassVar[bool] = True
    """Whether an artefact can take any batch size; otherwise `write` fixes it to that of the example inputs."""
    deploys: ClassVar[bool] = True
    """False for runtimes that aren't for deployment; they are used only by name, and aren't compared or timed."""
    decoders_only: ClassVar[bool] = False
    """Whether it only runs language models; comparisons of other models leave it out."""
    activations: ClassVar[str] = "uint8/tensor/asym"
    """A format of activations with integer kernels in this runtime."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    cache: CacheLayout | None = None
    """The cached tensors of a decoder. Calls may leave them out, and get only the scores."""
    batch: int | None
    """The fixed batch size of the artefact, or None if it takes any."""

    @staticmethod
    @abstractmethod
    def missing() -> str | None:
        """The reason why this runtime isn't available, or None."""

    def __init_subclass__(cls, **settings: Any) -> None:
        """Check the arguments of `run` in each runtime."""
        super().__init_subclass__(**settings)
        if "run" in vars(cls):
            cls.run = _checked(cls.run)  # type: ignore[method-assign]

    @abstractmethod
    def __init__(self, path: Path, *, threads: int | None = None) -> None:
        """Load the artefact."""

    @abstractmethod
    def run(self, feed: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """Run once, with arrays by input name; returns the output arrays in order."""

    @classmethod
    @abstractmethod
    def write(cls, model: nn.Module, path: Path, inputs: Any) -> None:
        """Write the artefact of a prepared, calibrated model; `inputs` is an example call."""

    @classmethod
    @abstractmethod
    def write_float(cls, model: nn.Module, path: Path, inputs: Any) -> None:
        """Write the float model, as a reference for comparisons."""

    @classmethod
    def size(cls, path: Path) -> int:
        """The deployed size in bytes: the artefact and files next to it."""
        return path.stat().st_size

    def executed(self) -> dict[str, int] | None:
        """The number of convolutions and matrix products by the type in which they run: {"int8": 20, "float": 1}.

        The numbers come from the runtime's optimized program, not from the artefact; None if they aren't available.
        """
        return None

    def left_in_float(self) -> tuple[str, ...] | None:
        """The names of the operators counted as float by `executed`; None if they aren't available."""
        return None

    @classmethod
    def stored(cls, path: Path) -> dict[str, NDArray[Any]]:
        """The stored tensors of each site: `<site>.codes` of weights, `<site>.scale`, `.zero_point`."""
        raise _hidden(cls.name)

    @classmethod
    def damages(cls, path: Path) -> list[Damage]:
        """Differences from the exported contents, according to the digests; empty without digests."""
        return []

    @classmethod
    def has_digests(cls, path: Path) -> bool:
        """Whether the artefact has digests, so that `damages` is meaningful."""
        return True

    @classmethod
    def probing(cls, path: Path, sites: Iterable[str]) -> Runtime:
        """Open the artefact with additional outputs `<site>.codes` for these sites."""
        raise _hidden(cls.name)

    def simulating(self, model: nn.Module) -> AbstractContextManager[None]:
        """Let the simulation round as this runtime does, where its rounding differs from that of quantizers."""
        return nullcontext()

    def rounding(self, model: nn.Module) -> AbstractContextManager[None] | None:
        """Let the simulation also round what this runtime rounds beyond the plan. None: nothing.

        Such a rounding can't be reproduced value by value, so that its effect is only a limit for differences.
        """
        return None

    def decoding(self) -> Callable[[NDArray[Any]], NDArray[np.float32]] | None:
        """A function that takes token ids, (samples, tokens), after those of its earlier calls, and returns scores.

        None if this artefact isn't a decoder with a cache. Another call begins again.
        """
        from bitwright.deployment.runtimes.decoding import DecoderSession  # it is imported by runtimes

        return None if self.cache is None else DecoderSession(self).feed

    def concerns(self, model: nn.Module, ids: Tensor | None) -> list[Problem]:
        """Warnings about the artefact that comparisons of numbers don't find; `ids` are tokens of the data."""
        return []

    def feed(self, *args: Any, **kwargs: Any) -> dict[str, NDArray[Any]]:
        """The input arrays of a call of the model: keywords by name, the others in order."""
        arrays: dict[str, NDArray[Any]] = {}
        inputs = self.inputs if self.cache is None else self.inputs[:1]
        rest: list[Tensor] = [tensor for _, tensor in tensors_in(args)]
        for path, tensor in tensors_in(kwargs):
            name = path if path in self.inputs else re.sub(r"\W", "_", path)  # `d.u` is the artefact's `d_u`
            if name in self.inputs:
                arrays[name] = self.array(tensor)
            else:
                rest.append(tensor)
        free = [name for name in inputs if name not in arrays]
        if len(rest) != len(free):
            raise ArtefactError(
                f"the artefact takes {len(self.inputs)} tensors",
                value=f"{len(rest) + len(arrays)} given",
                fix=f"inputs: {', '.join(self.inputs)}",
                code="wrong-inputs",
            )
        arrays.update({name: self.array(tensor) for name, tensor in zip(free, rest, strict=True)})
        return arrays if self.cache is None else self.cache.completed(arrays, self.inputs)

    def array(self, tensor: Tensor) -> NDArray[Any]:
        """Convert one input for the artefact."""
        return as_array(tensor)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it like the model; an artefact with a fixed batch processes larger inputs in pieces."""
        return in_chunks(self._call, self.batch)(*args, **kwargs)

    def latency(self, *args: Any, runs: int = 50, **kwargs: Any) -> Latency:
        """Time one call. To compare runtimes, measure them in alternation: `measure_latency`, `benchmark`."""
        from bitwright.deployment.measurement import measure_latency  # it imports this module

        return measure_latency({self.name: partial(self.run, self.feed(*args, **kwargs))}, runs=runs)[self.name]

    def accuracy(self, workload: Workload) -> dict[str, float]:
        """The workload's metrics on its evaluation data; outputs have the structure of the model's outputs."""
        with torch.no_grad(), eval_mode(workload.model):
            example = call(workload.model, workload.inputs)
        return evaluate(workload, partial(_shaped, self, example))

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        results = [torch.from_numpy(np.ascontiguousarray(a)) for a in self.run(self.feed(*args, **kwargs))]
        return results[0] if len(results) == 1 else tuple(results)


def _checked(run: Callable[..., list[NDArray[Any]]]) -> Callable[..., list[NDArray[Any]]]:
    """`run`, which rejects what isn't a dict with an array for each input."""

    @wraps(run)
    def call(self: Runtime, feed: Any) -> list[NDArray[Any]]:
        if isinstance(feed, dict) and feed.keys() == set(self.inputs):
            other = next((type(one).__name__ for one in feed.values() if not isinstance(one, np.ndarray)), None)
            if other is None:
                return run(self, feed)
            given = f"a dict of {other}"
        else:
            given = f"a dict with {', '.join(map(repr, feed))}" if isinstance(feed, dict) else type(feed).__name__
        arrays = ", ".join(f"{name!r}: array" for name in self.inputs)
        raise ArtefactError(
            "run() takes a dict with a NumPy array for each input of the artefact",
            value=given,
            fix=f"run({{{arrays}}}); or call the runtime like the model, with tensors: runtime(x)",
            code="wrong-inputs",
        )

    return call


def _shaped(runtime: Runtime, example: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the runtime and return its tensors in the structure of the model's output: dicts, dataclasses, …"""
    output = runtime(*args, **kwargs)
    tensors = [output] if isinstance(output, Tensor) else list(output)
    if len(tensors) != sum(1 for _ in tensors_in(example)):
        return output
    left = iter(tensors)
    return map_tensors(example, lambda _: next(left))


def _hidden(runtime: str) -> ArtefactError:
    what = f"{runtime} doesn't expose the contents of its artefacts"
    return ArtefactError(what, fix="check without --per-site", code="contents-not-accessible")


class OnnxReader(Runtime):
    """A runtime that runs the QDQ ONNX file written by `export`."""

    suffix: ClassVar[str] = ".onnx"

    @classmethod
    def write(cls, model: nn.Module, path: Path, inputs: Any) -> None:
        """Write QDQ ONNX, with a dynamic batch if the model's code allows it; a decoder with its cache."""
        from bitwright.deployment.export import decoder_folder, export  # it imports this module

        export(model, decoder_folder(model, path) or path, inputs)

    @classmethod
    def write_float(cls, model: nn.Module, path: Path, inputs: Any) -> None:
        """Write the float model as ONNX; a decoder with its cache."""
        from bitwright.deployment.export import decoder_folder, export_float

        export_float(model, decoder_folder(model, path) or path, inputs)

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


def artefact_file(path: Path) -> Path:
    """The ONNX file of a decoder's folder; other paths are returned as they are."""
    return path / "model.onnx" if path.is_dir() and (path / "model.onnx").is_file() else path


def input_error(runtime: str, error: Exception) -> ArtefactError:
    """Convert a runtime's exception about its inputs to an ArtefactError."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return ArtefactError(
        f"{runtime} can't run the artefact with these inputs: {lines[0]}",
        fix="use the shapes and the batch size of the export",
        code="runtime-failed",
    )


@strict
def open_runtime(name: str, path: str | Path, *, threads: int | None = None) -> Runtime:
    """Load an artefact. The result is called like the model.

    >>> import tempfile, torch, bitwright
    >>> x = torch.randn(2, 8)
    >>> path = bitwright.export_float(torch.nn.Linear(8, 4), tempfile.mkdtemp() + "/model.onnx", x)
    >>> bitwright.open_runtime("onnxruntime", path)(x).shape
    torch.Size([2, 4])
    """
    kind: type[Runtime] = RUNTIMES.get(name)
    reason = kind.missing()
    if reason is not None:
        what, fix = f"{name} isn't available: {reason}", f"pip install 'bitwright[{name}]'"
        raise ArtefactError(what, fix=fix, code="runtime-unavailable")
    path = Path(path) if kind.suffix == FOLDER else artefact_file(Path(path))
    if not (path.is_dir() if kind.suffix == FOLDER else path.is_file()):
        fix = f"pass the path of an exported {f'{kind.suffix} file' if kind.suffix else 'folder'}"
        raise ArtefactError("the artefact doesn't exist", where=str(path), fix=fix, code="no-such-artefact")
    others = [other for other, (suffix, _) in suffixes().items() if suffix and suffix == path.suffix]
    if others and kind.suffix != FOLDER and path.suffix != kind.suffix:
        what = f"{name} reads {kind.suffix} files, but this is a file of {' and '.join(others)}"
        fix = f"check it on {others[0]} (--runtime {others[0]})"
        raise ArtefactError(what, where=str(path), fix=fix, code="other-runtime")
    if kind.suffix == ".onnx":
        load_onnx(path)  # validates file references, which runtimes would follow anywhere
    try:
        return kind(path, threads=threads)
    except BitwrightError:
        raise
    except Exception as error:  # runtimes raise different types for a broken file
        raise ArtefactError(
            f"{name} can't load the artefact: {_cause(error)}",
            where=str(path),
            fix=_loading_fix(kind, path),
            code="artefact-not-loadable",
        ) from error


def _loading_fix(kind: type[Runtime], path: Path) -> str:
    """The fix for an artefact that can't be loaded: a new export helps only if the file is damaged."""
    try:
        damages = kind.damages(path)
    except Exception:  # the file can't be read
        return "the file is truncated or isn't an artefact: export it again"
    if damages:
        return f"the file is damaged ({damages[0].what}): export it again"
    return f"{kind.name} doesn't support this model: use another runtime, or keep the operators it reports in float"


def _cause(error: Exception) -> str:
    """The first informative line: torch's compiler starts with `backend='inductor' raised:`."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()] or [type(error).__name__]
    return lines[1] if len(lines) > 1 and lines[0].endswith("raised:") else lines[0]


def available_runtimes() -> dict[str, str | None]:
    """All deployment runtimes, each with the reason why it isn't available, or None."""
    found: dict[str, str | None] = {}
    for name in RUNTIMES.names():
        try:
            kind: type[Runtime] = RUNTIMES.get(name)
            if kind.deploys:
                found[name] = kind.missing()
        except Exception as error:  # a broken plugin must not affect the others
            found[name] = f"its plugin can't be loaded: {error}"
    return found


def suffixes() -> dict[str, tuple[str | None, str | None]]:
    """The file suffix of each runtime (None if its plugin is broken), and why it isn't available, or None."""
    found: dict[str, tuple[str | None, str | None]] = {}
    for name, problem in available_runtimes().items():
        try:
            found[name] = (RUNTIMES.get(name).suffix, problem)
        except Exception:  # a broken plugin; `problem` describes it
            found[name] = (None, problem)
    return found


def readers(path: Path) -> list[str]:
    """The available runtimes that read files with this suffix; unknown suffixes count as ONNX.

    Raises an error if no runtime for this file is available.
    """
    known, path = suffixes(), artefact_file(path)
    suffix = path.suffix if path.suffix and path.suffix in {own for own, _ in known.values()} else ".onnx"
    suffix = FOLDER if path.is_dir() else suffix
    problems = {name: problem for name, (own, problem) in known.items() if own == suffix}
    usable = [name for name, problem in problems.items() if problem is None]
    if not usable:
        reasons = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
        raise ArtefactError(
            "no available runtime reads this file",
            where=str(path),
            value=reasons,
            fix="run `bitwright doctor`",
            code="runtime-unavailable",
        )
    return usable
