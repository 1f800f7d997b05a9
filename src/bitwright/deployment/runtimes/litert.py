"""LiteRT (TensorFlow Lite), with its optimized kernels or the reference kernels that TensorFlow Lite Micro uses.

`write` converts our Q/DQ graph to a .tflite file with int8 operators, without TensorFlow's converter. The metadata
of the file maps our sites to its tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes
from numpy.typing import NDArray
from pydantic import Field
from torch import nn

from bitwright.core.documents import parse_json
from bitwright.core.errors import ArtefactError, Problem
from bitwright.core.files import replacing, scratch_folder
from bitwright.core.schemas import Strict, validated
from bitwright.deployment.artefacts.base import QDQ
from bitwright.deployment.export import export, export_float
from bitwright.deployment.onnx_files import Damage, compare_digests
from bitwright.deployment.runtimes.base import Runtime, input_error
from bitwright.deployment.runtimes.litert_arithmetic import LiteRtRounding
from bitwright.deployment.runtimes.litert_operators import OPERATORS
from bitwright.deployment.runtimes.litert_writer import (
    NOTES,
    OWN,
    STRUCTURE,
    GraphWriter,
    constants_of,
    own_digest,
    packed,
    structure_of,
    unpacked,
)

_FIX = "export it again"
_Index = Annotated[int, Field(ge=0, le=1 << 31)]


class WeightTensor(Strict):
    """The tensor of a weight or bias, and the site whose quantizer it has."""

    tensor: str
    owner: str


class Notes(Strict):
    """The metadata of a file that Bitwright wrote."""

    version: Literal[1] = 1
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    sites: dict[str, tuple[_Index, bool]]
    """The tensor of each site's codes, and whether its channels are last."""
    grids: dict[str, tuple[float, int]]
    """Scale and zero point of each quantizer of activations."""
    weights: dict[str, WeightTensor]
    products: dict[str, bool]
    """The convolutions and matrix products; whether each multiplies integers."""
    digests: dict[str, str] = Field(default_factory=dict)


@dataclass(frozen=True)
class TfliteFile:
    """A .tflite file; files of other tools have no notes."""

    path: Path
    model: Any
    constants: dict[str, NDArray[Any]]
    """Constants by the name of their tensor."""
    structure: str
    """The digest of tensors and operators."""
    notes: Notes | None

    def damages(self) -> list[Damage]:
        """Differences from the exported contents."""
        if self.notes is None:
            return []
        digests = dict(self.notes.digests)
        own, structure = digests.pop(OWN, None), digests.pop(STRUCTURE, None)
        found = [Damage(site=one.site.split("~")[0], what=one.what) for one in compare_digests(digests, self.constants)]
        if own != own_digest(self.notes.model_dump(mode="json")):
            found.append(Damage(site=NOTES, what="the metadata changed after the export"))
        if structure != self.structure:
            found.append(Damage(site=STRUCTURE, what="tensors or operators changed after the export"))
        return found

    def refuse_changes(self) -> None:
        """Raise an error if tensors, operators or the notes differ from those that were exported."""
        changed = next((one for one in self.damages() if one.site in (STRUCTURE, NOTES)), None)
        if changed is not None:
            raise ArtefactError(changed.what, where=str(self.path), fix=_FIX, code="damaged-artefact")

    def stored(self) -> dict[str, NDArray[Any]]:
        """Codes, scales and zero points by site."""
        notes = self.sited
        self.refuse_changes()
        tensors = {tensor.name.decode(): tensor for tensor in self.model.subgraphs[0].tensors}
        found: dict[str, NDArray[Any]] = {}
        for site, weight in notes.weights.items():
            codes = self.constants[weight.tensor]
            grid = tensors[weight.tensor].quantization
            found[f"{site}.codes"] = codes
            found[f"{weight.owner}.scale"] = np.asarray(grid.scale, np.float32)
            if codes.dtype != np.int32:  # a bias has no zero point
                found[f"{weight.owner}.zero_point"] = np.asarray(grid.zeroPoint, np.int64)
        for site, (index, _) in notes.sites.items():
            grid = self.model.subgraphs[0].tensors[index].quantization
            if site in notes.grids:
                found[f"{site}.scale"] = np.asarray(grid.scale, np.float32)
                found[f"{site}.zero_point"] = np.asarray(grid.zeroPoint, np.int64)
        return found

    @property
    def sited(self) -> Notes:
        """The notes. Raises an error if the file has no notes or no sites."""
        if self.notes is None or not (self.notes.sites or self.notes.weights):
            fix = "pass the artefact of the quantized model"
            raise ArtefactError("this artefact has no sites", where=str(self.path), fix=fix, code="no-sites")
        return self.notes


def load(path: Path) -> TfliteFile:
    """Read a .tflite file."""
    try:
        model = unpacked(path.read_bytes())
        texts = [
            bytes(np.asarray(model.buffers[one.buffer].data, np.uint8)).decode()
            for one in model.metadata or []
            if one.name == NOTES.encode()
        ]
        constants, structure = constants_of(model), structure_of(model)
    except Exception as error:  # flatbuffers raises many types for a damaged file
        what = f"the file can't be read: {type(error).__name__}"
        raise ArtefactError(what, where=str(path), fix=_FIX, code="damaged-artefact") from error
    if not texts:
        return TfliteFile(path, model, constants, structure, None)
    where = f"{path}, {NOTES}"
    data = parse_json(texts[0], where=where, what="the artefact's notes", fix=_FIX, error=ArtefactError)

    def refusal(problems: list[Problem]) -> ArtefactError:
        first = problems[0]
        return ArtefactError(first.what, where=first.where, value=first.value, fix=_FIX, code=first.code)

    notes = validated(Notes, data, title="", error=refusal)
    graph = model.subgraphs[0]
    names = {tensor.name.decode() for tensor in graph.tensors}
    beyond = [site for site, (index, _) in notes.sites.items() if index >= len(graph.tensors)]
    beyond += [site for site, weight in notes.weights.items() if weight.tensor not in names]
    counts = (len(notes.inputs), len(notes.outputs))
    if beyond or counts != (len(graph.inputs), len(graph.outputs)):
        what = "the artefact's notes don't match its tensors"
        raise ArtefactError(what, where=beyond[0] if beyond else where, fix=_FIX, code="damaged-artefact")
    return TfliteFile(path, model, constants, structure, notes)


class LiteRt(Runtime):
    """Runs .tflite files with LiteRT's optimized kernels (XNNPACK)."""

    name = "litert"
    suffix: ClassVar[str] = ".tflite"
    any_batch = False
    activations = "int8/tensor/asym"
    resolver: ClassVar[str] = "BUILTIN"

    @staticmethod
    def missing() -> str | None:
        return None if find_spec("ai_edge_litert") else "the package ai-edge-litert is not installed"

    @classmethod
    def write(cls, model: nn.Module, path: Path, inputs: Any) -> None:
        """Convert the Q/DQ graph; one error lists all operators and formats that LiteRT doesn't support."""
        with scratch_folder() as folder:
            file = folder / "model.onnx"
            export(model, file, inputs, dynamic_batch=False, artefact=QDQ)
            _convert(file, path)

    @classmethod
    def write_float(cls, model: nn.Module, path: Path, inputs: Any) -> None:
        """Convert the float model."""
        with scratch_folder() as folder:
            _convert(export_float(model, folder / "model.onnx", inputs, dynamic_batch=False), path)

    def __init__(self, path: Path, *, threads: int | None = None) -> None:
        file = load(path)
        file.refuse_changes()  # kernels could read beyond the end of a tensor
        self.path, self.file = path, file
        self._open(path.read_bytes(), threads)
        graph = file.model.subgraphs[0]
        named = [graph.tensors[index].name.decode() for index in graph.inputs]
        self.inputs = tuple(named) if file.notes is None else file.notes.inputs
        outputs = tuple(f"output_{index}" for index in range(len(graph.outputs)))
        self.outputs = outputs if file.notes is None else file.notes.outputs
        shapes = [details["shape"] for details in self.interpreter.get_input_details()]
        self.batch = next((int(shape[0]) for shape in shapes if len(shape)), None)

    def _open(self, data: bytes, threads: int | None) -> None:
        from ai_edge_litert.interpreter import Interpreter, OpResolverType

        resolver = OpResolverType[self.resolver]
        self.interpreter = Interpreter(model_content=data, num_threads=threads, experimental_op_resolver_type=resolver)
        self.interpreter.allocate_tensors()

    def run(self, feed: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """Run once."""
        try:
            for name, details in zip(self.inputs, self.interpreter.get_input_details(), strict=True):
                array = np.ascontiguousarray(feed[name], details["dtype"])
                self.interpreter.set_tensor(details["index"], array)
            self.interpreter.invoke()
        except (ValueError, RuntimeError) as error:
            raise input_error(self.name, error) from error
        return [self.interpreter.get_tensor(details["index"]) for details in self.interpreter.get_output_details()]

    def executed(self) -> dict[str, int] | None:
        """The products with integer operands and results in the file, for which LiteRT has only integer kernels."""
        if self.file.notes is None:
            return None
        integer = sum(self.file.notes.products.values())
        return {"int8": integer, "float": len(self.file.notes.products) - integer}

    def left_in_float(self) -> tuple[str, ...] | None:
        """The names in the file."""
        notes = self.file.notes
        return None if notes is None else tuple(name for name, integer in notes.products.items() if not integer)

    @classmethod
    def stored(cls, path: Path) -> dict[str, NDArray[Any]]:
        """The constants of the file."""
        return load(path).stored()

    @classmethod
    def damages(cls, path: Path) -> list[Damage]:
        """Check the digests in the file."""
        return load(path).damages()

    @classmethod
    def has_digests(cls, path: Path) -> bool:
        """Files of other tools have no digests."""
        notes = load(path).notes
        return notes is not None and bool(notes.digests)

    @classmethod
    def probing(cls, path: Path, sites: Iterable[str]) -> Runtime:
        """Open a copy in which the codes of these sites are outputs."""
        return _probe_of(cls)(path, sites)


class LiteRtReference(LiteRt):
    """Runs .tflite files with LiteRT's reference kernels: the arithmetic of TensorFlow Lite Micro, without speed."""

    name = "litert_reference"
    deploys = False
    resolver: ClassVar[str] = "BUILTIN_REF"

    def simulating(self, model: nn.Module) -> AbstractContextManager[None]:
        """Round as these kernels do."""
        if self.file.notes is None:
            return nullcontext()
        return LiteRtRounding(self.file.model, self.file.notes.sites).applied(model)


def _convert(source: Path, path: Path) -> None:
    model = ir.load(source)
    passes.ShapeInferencePass()(model)
    data = GraphWriter(model.graph, OPERATORS).run()
    with replacing(path) as temporary:
        temporary.write_bytes(data)


class _Probe(LiteRt):
    """A copy of an artefact with more outputs."""

    def __init__(self, path: Path, sites: Iterable[str]) -> None:
        super().__init__(path)
        notes = self.file.sited
        self.shown = {site: notes.sites[site] for site in sites if site in notes.sites}
        graph = self.file.model.subgraphs[0]
        self.own = len(graph.outputs)
        ends = [*(int(index) for index in graph.outputs), *(index for index, _ in self.shown.values())]
        self.order = list(dict.fromkeys(ends))
        self.at = [self.order.index(index) for index in ends]
        graph.outputs = np.array(self.order, np.int32)
        self._open(packed(self.file.model), None)
        self.outputs = (*self.outputs, *(f"{site}.codes" for site in self.shown))

    def run(self, feed: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """Run once; codes have the layout of the model."""
        found = super().run(feed)
        arrays = [found[position] for position in self.at]
        lasts = [False] * self.own + [last for _, last in self.shown.values()]
        return [
            np.moveaxis(array, -1, 1) if last and array.ndim > 2 else array
            for array, last in zip(arrays, lasts, strict=True)
        ]


class _ReferenceProbe(_Probe):
    """A probe that runs the reference kernels."""

    name = LiteRtReference.name
    deploys = False
    resolver: ClassVar[str] = LiteRtReference.resolver


def _probe_of(kind: type[LiteRt]) -> type[_Probe]:
    return _ReferenceProbe if kind.resolver == LiteRtReference.resolver else _Probe
