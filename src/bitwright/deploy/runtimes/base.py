"""One interface to all runtimes: load an artefact, call it as the model is called."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bitwright.core.arguments import strict
from bitwright.core.errors import ArtefactError, BitwrightError
from bitwright.core.modes import eval_mode
from bitwright.core.registry import RUNTIMES
from bitwright.core.tensor_tree import map_tensors, tensors_in
from bitwright.deploy.agreement import as_array
from bitwright.deploy.integrity import Damage
from bitwright.deploy.measure import Latency, measure_latency
from bitwright.deploy.onnx_files import load_onnx
from bitwright.workload import Workload, call, evaluate
from bitwright.workload.data import in_chunks


class Runtime(ABC):
    """An artefact, loaded. Calling it looks like calling the model: tensors in, a tensor or a tuple of them out."""

    name: ClassVar[str]
    suffix: ClassVar[str]
    """How files that it reads are called."""
    any_batch: ClassVar[bool] = True
    """Whether one artefact can take batches of any size; else `write` fixes it to that of the example inputs."""
    deploys: ClassVar[bool] = True
    """False for what only explains: it is used by name, and isn't among the runtimes that are tried and timed."""
    activations: ClassVar[str] = "uint8/tensor/asym"
    """A format of activations for which it has integer kernels."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    batch: int | None
    """The batch size that the artefact is bound to, or None if it takes any."""

    @staticmethod
    @abstractmethod
    def missing() -> str | None:
        """Why this runtime can't be used here, or None."""

    @abstractmethod
    def __init__(self, path: Path, *, threads: int | None = None) -> None:
        """Load the artefact."""

    @abstractmethod
    def run(self, feed: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """Arrays by input name → output arrays in order."""

    @classmethod
    @abstractmethod
    def write(cls, model: nn.Module, path: Path, inputs: Any) -> None:
        """Write the artefact of a prepared, calibrated model; `inputs` is one example call."""

    @classmethod
    @abstractmethod
    def write_float(cls, model: nn.Module, path: Path, inputs: Any) -> None:
        """Write the float model: what the quantized one is compared with."""

    @classmethod
    def size(cls, path: Path) -> int:
        """The bytes of what is deployed: the artefact, and files that lie beside it."""
        return path.stat().st_size

    def executed(self) -> dict[str, int] | None:
        """Convolutions and matrix products by the type in which they really run: {"int8": 20, "float": 1}.

        It is read from the runtime's own optimized program, not from the artefact; None: this runtime doesn't tell.
        """
        return None

    def left_in_float(self) -> tuple[str, ...] | None:
        """Operators among those of `executed` that run in float, by name; None: this runtime doesn't name them."""
        return None

    @classmethod
    def stored(cls, path: Path) -> dict[str, NDArray[Any]]:
        """What the artefact stores of each site, by name: `<site>.codes` of weights, `<site>.scale`, `.zero_point`."""
        raise _hidden(cls.name)

    @classmethod
    def damages(cls, path: Path) -> list[Damage]:
        """What isn't as it was written, by the digests that artefacts carry; nothing where there are none."""
        return []

    @classmethod
    def has_digests(cls, path: Path) -> bool:
        """Whether `damages` can tell if the artefact is as it was written."""
        return True

    @classmethod
    def probing(cls, path: Path, sites: Iterable[str]) -> Runtime:
        """The artefact, opened so that it also returns the codes of these sites, as outputs named `<site>.codes`."""
        raise _hidden(cls.name)

    def feed(self, *args: Any, **kwargs: Any) -> dict[str, NDArray[Any]]:
        """The arrays that a call of the model stands for: keywords by name, the rest in order."""
        arrays: dict[str, NDArray[Any]] = {}
        rest: list[Tensor] = [tensor for _, tensor in tensors_in(args)]
        for path, tensor in tensors_in(kwargs):
            if path in self.inputs:
                arrays[path] = self.array(tensor)
            else:
                rest.append(tensor)
        free = [name for name in self.inputs if name not in arrays]
        if len(rest) != len(free):
            raise ArtefactError(
                f"the artefact takes {len(self.inputs)} tensors",
                value=f"{len(rest) + len(arrays)} given",
                fix=f"inputs: {', '.join(self.inputs)}",
            )
        arrays.update({name: self.array(tensor) for name, tensor in zip(free, rest, strict=True)})
        return arrays

    def array(self, tensor: Tensor) -> NDArray[Any]:
        """One input as the artefact takes it."""
        return as_array(tensor)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run as the model is called; an artefact with a fixed batch takes more samples piece by piece."""
        return in_chunks(self._call, self.batch)(*args, **kwargs)

    def latency(self, *args: Any, runs: int = 50, **kwargs: Any) -> Latency:
        """Time one call. To compare runtimes, measure them in turns instead: `measure_latency`, `benchmark`."""
        return measure_latency({self.name: partial(self.run, self.feed(*args, **kwargs))}, runs=runs)[self.name]

    def accuracy(self, workload: Workload) -> dict[str, float]:
        """What the workload measures, on its evaluation data; its metric sees outputs as its model gives them."""
        with torch.no_grad(), eval_mode(workload.model):
            example = call(workload.model, workload.inputs)
        return evaluate(workload, partial(_shaped, self, example))

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        results = [torch.from_numpy(np.ascontiguousarray(a)) for a in self.run(self.feed(*args, **kwargs))]
        return results[0] if len(results) == 1 else tuple(results)


def _shaped(runtime: Runtime, example: Any, *args: Any, **kwargs: Any) -> Any:
    """A call of the runtime, with its tensors put into the nest that the model returned: dicts, dataclasses, …"""
    output = runtime(*args, **kwargs)
    tensors = [output] if isinstance(output, Tensor) else list(output)
    if len(tensors) != sum(1 for _ in tensors_in(example)):
        return output
    left = iter(tensors)
    return map_tensors(example, lambda _: next(left))


def _hidden(runtime: str) -> ArtefactError:
    return ArtefactError(f"{runtime} doesn't show what is inside its artefacts", fix="check without --per-site")


def refused(runtime: str, error: Exception) -> ArtefactError:
    """A runtime's own exception for inputs that don't fit, in our words; each runtime has types of its own."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return ArtefactError(
        f"{runtime} can't run the artefact with these inputs: {lines[0]}",
        fix="call it with the shapes and the batch that it was exported with",
    )


@strict
def open_runtime(name: str, path: str | Path, *, threads: int | None = None) -> Runtime:
    """Load an artefact; what can't be loaded is one clear error."""
    kind: type[Runtime] = RUNTIMES.get(name)
    reason = kind.missing()
    if reason is not None:
        raise ArtefactError(f"{name} can't be used here: {reason}", fix=f"pip install 'bitwright[{name}]'")
    path = Path(path)
    if not path.is_file():
        raise ArtefactError("no such artefact", where=str(path), fix=f"give the path of an exported {kind.suffix} file")
    others = [other for other, (suffix, _) in _suffixes().items() if suffix == path.suffix]
    if others and path.suffix != kind.suffix:
        what = f"{name} reads {kind.suffix} files, and this is one of {' and '.join(others)}"
        raise ArtefactError(what, where=str(path), fix=f"check it on {others[0]} (--runtime {others[0]})")
    if kind.suffix == ".onnx":
        load_onnx(path)  # runtimes read weights wherever the file says they are
    try:
        return kind(path, threads=threads)
    except BitwrightError:
        raise
    except Exception as error:  # each runtime has its own exception types for a broken file
        raise ArtefactError(
            f"{name} can't load the artefact: {_cause(error)}",
            where=str(path),
            fix=_loading_fix(kind, path),
            code="artefact-not-loadable",
        ) from error


def _loading_fix(kind: type[Runtime], path: Path) -> str:
    """Export again only what was damaged; a whole file would be the same."""
    try:
        damages = kind.damages(path)
    except Exception:  # the file can't even be read
        return "the file is cut off or isn't an artefact: export it again"
    if damages:
        return f"the file is damaged ({damages[0].what}): export it again"
    return f"{kind.name} can't run this model: take another runtime, or keep the operators that it names in float"


def _cause(error: Exception) -> str:
    """The first line that says something: torch's compiler begins with `backend='inductor' raised:`."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()] or [type(error).__name__]
    return lines[1] if len(lines) > 1 and lines[0].endswith("raised:") else lines[0]


def available_runtimes() -> dict[str, str | None]:
    """Every registered runtime that deploys, with the reason why it can't be used here, or None."""
    found: dict[str, str | None] = {}
    for name in RUNTIMES.names():
        try:
            kind: type[Runtime] = RUNTIMES.get(name)
            if kind.deploys:
                found[name] = kind.missing()
        except Exception as error:  # somebody's plugin that can't be imported must not stop the others
            found[name] = f"its plugin can't be loaded: {error}"
    return found


def _suffixes() -> dict[str, tuple[str | None, str | None]]:
    """What each runtime reads (None: its plugin can't be loaded), and why it can't be used here, or None."""
    found: dict[str, tuple[str | None, str | None]] = {}
    for name, problem in available_runtimes().items():
        try:
            found[name] = (RUNTIMES.get(name).suffix, problem)
        except Exception:  # somebody's plugin; `problem` says so
            found[name] = (None, problem)
    return found


def readers(path: Path) -> list[str]:
    """The runtimes that can be used here and read files with this suffix; a file with an unknown one is ONNX.

    A file of a runtime that can't be used here is an error, with the reason.
    """
    known = _suffixes()
    suffix = path.suffix if path.suffix in {own for own, _ in known.values()} else ".onnx"
    problems = {name: problem for name, (own, problem) in known.items() if own == suffix}
    usable = [name for name, problem in problems.items() if problem is None]
    if not usable:
        reasons = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
        raise ArtefactError(
            "no runtime here reads this file", where=str(path), value=reasons, fix="see `bitwright doctor`"
        )
    return usable
