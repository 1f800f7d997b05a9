"""LiteRT (TensorFlow Lite), with its optimized kernels or the reference kernels that TensorFlow Lite Micro uses.

`write` converts our Q/DQ graph to a .tflite file with int8 operators, without TensorFlow's converter. The metadata
of the file maps our sites to its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from bitwright.core.documents import parse_json
from bitwright.core.errors import ArtefactError, Problem
from bitwright.core.files import replacing, scratch_folder
from bitwright.core.schemas import Strict, validated
from bitwright.deployment.artefacts.base import QDQ
from bitwright.deployment.export import export, export_float
from bitwright.deployment.onnx_files import Damage, compare_digests
from bitwright.deployment.runtimes.base import Runtime, input_error
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
from bitwright.quantizers import Quantizer, quantizers_of, tapped

_PRODUCTS = ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED")
Codes64 = NDArray[np.int64]


def _fixed_point(ratio: NDArray[np.float64]) -> tuple[Codes64, Codes64]:
    """A ratio as a multiplier of 31 bits and a power of two."""
    mantissa, exponent = np.frexp(ratio)
    multiplier = np.floor(np.ldexp(mantissa, 31) + 0.5).astype(np.int64)
    whole = multiplier == 1 << 31
    return np.where(whole, multiplier >> 1, multiplier), exponent.astype(np.int64) + whole


def _rescaled(x: Codes64, multiplier: Codes64, exponent: Codes64) -> Codes64:
    """x·multiplier·2^(exponent−31), rounded to the multiplier's 31 bits first and to the remaining shift after that."""
    left, right = np.maximum(exponent, 0), np.maximum(-exponent, 0)
    product = (x << left) * multiplier
    nudge = np.where(product >= 0, 1 << 30, 1 - (1 << 30))
    high = product + nudge
    high = np.where(high >= 0, high >> 31, -((-high) >> 31))  # towards zero
    mask = (np.int64(1) << right) - 1
    result: Codes64 = (high >> right) + ((high & mask) > (mask >> 1) + (high < 0))
    return result


def _rescaled_once(x: Codes64, multiplier: Codes64, exponent: Codes64) -> Codes64:
    """The same with one rounding, ties upwards."""
    right = 31 - exponent
    result: Codes64 = (x * multiplier + (np.int64(1) << (right - 1))) >> right
    return result


class LiteRtRounding:
    """The simulation with the rounding of LiteRT's reference kernels: replaces the quantizers' rounding in one run.

    The simulation computes sums in float32, so a sum next to a tie may get another code than on LiteRT. Such
    differences grow from layer to layer. Here each quantizer recovers the integer sum from the operator's float32
    result, and rescales it as LiteRT's kernel does. Operators without a rule here keep the simulation's rounding.
    """

    def __init__(self, model: Any, sites: dict[str, tuple[int, bool]]) -> None:
        from ai_edge_litert import schema_py_generated

        kinds = {number: name for name, number in vars(schema_py_generated.BuiltinOperator).items() if name[0] != "_"}
        self.tensors = model.subgraphs[0].tensors
        self.sites = sites
        self.producers: dict[int, tuple[str, Any]] = {}
        for operator in model.subgraphs[0].operators:
            kind = kinds[model.operatorCodes[operator.opcodeIndex].builtinCode]
            self.producers.update({int(index): (kind, operator) for index in operator.outputs})
        self.codes: dict[int, Codes64] = {}
        self._site: str | None = None

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Install it in all quantizers of activations."""
        quantizers = [quantizer for quantizer in quantizers_of(model).values() if not quantizer.weight]
        for quantizer in quantizers:
            quantizer.stand_in = self._substitute(quantizer)
        self.codes = {}
        try:
            with tapped(model, self._look):
                yield
        finally:
            for quantizer in quantizers:
                quantizer.stand_in = None

    def _look(self, site: str, quantizer: Quantizer, x: Tensor) -> None:
        self._site = site

    def _substitute(self, quantizer: Quantizer) -> Callable[[Tensor], Tensor]:
        def substitute(x: Tensor) -> Tensor:
            found = self.sites.get(self._site or "")
            if found is None or found[0] in self.codes:
                return quantizer.quantize(x)
            exact = self._rounded(found[0], x.detach().double().cpu().numpy())
            if exact is None:
                self.codes[found[0]] = quantizer.integers(x).cpu().numpy().astype(np.int64)
                return quantizer.quantize(x)
            self.codes[found[0]] = exact
            scale, zero = self._grid(found[0])
            return torch.from_numpy((exact - zero).astype(np.float32) * np.float32(scale)).to(x.device)

        return substitute

    def _grid(self, index: int) -> tuple[float, int]:
        grid = self.tensors[index].quantization
        return float(grid.scale[0]), int(grid.zeroPoint[0])

    def _rounded(self, index: int, x: NDArray[np.float64]) -> Codes64 | None:
        """The codes that LiteRT computes for the values `x`, or None without a rule."""
        kind, operator = self.producers.get(index, ("", None))
        scale, zero = self._grid(index)
        found: Codes64 | None = None
        if kind in _PRODUCTS:
            rescale = _rescaled_once if kind == "FULLY_CONNECTED" else _rescaled
            found = self._product(operator, x, scale, zero, rescale)
        elif kind == "AVERAGE_POOL_2D" and operator.builtinOptions.padding == 1:
            found = self._average(operator, x, scale, zero)
        elif kind == "MEAN":
            found = self._mean(operator, x, scale, zero)
        elif kind == "ADD":
            found = self._sum(operator, scale, zero)
            low = np.floor(x.min() / scale + zero) if operator.builtinOptions.fusedActivationFunction else -128
            found = None if found is None else np.maximum(found, np.int64(zero) if low >= zero else -128)
        return None if found is None else np.clip(found, -128, 127)

    def _product(
        self,
        operator: Any,
        x: NDArray[np.float64],
        scale: float,
        zero: int,
        rescale: Callable[[Codes64, Codes64, Codes64], Codes64],
    ) -> Codes64 | None:
        source, weight = (self.tensors[int(index)].quantization for index in operator.inputs[:2])
        factors = np.asarray(weight.scale, np.float32).astype(np.float64) * float(source.scale[0])
        axis = 1 if x.ndim == 4 else x.ndim - 1
        if factors.size > 1:
            if x.shape[axis] != factors.size:
                return None  # a later operator moved the channels
            factors = factors.reshape([-1 if i == axis else 1 for i in range(x.ndim)])
        multiplier, exponent = _fixed_point(factors / scale)
        numbers = x / scale
        codes = np.rint(numbers)
        # Only next to ties do the kernels round differently; the float32 sums are exact to less than 0.01 code.
        margin = 0.01 + 2.0 ** (min(int(exponent.max()), 0) - 1)
        ties = np.nonzero(np.abs(numbers - codes) > 0.5 - margin)
        found: Codes64 = codes.astype(np.int64)
        if ties[0].size:
            sums = np.rint(x[ties] / np.broadcast_to(factors, x.shape)[ties]).astype(np.int64)
            own = (np.broadcast_to(one, x.shape)[ties] for one in (multiplier, exponent))
            found[ties] = rescale(sums, *own)
        return found + zero

    def _average(self, operator: Any, x: NDArray[np.float64], scale: float, zero: int) -> Codes64:
        options = operator.builtinOptions
        count = options.filterHeight * options.filterWidth
        sums = np.rint((x / scale + zero) * count).astype(np.int64)
        found: Codes64 = np.where(sums > 0, (sums + count // 2) // count, -((count // 2 - sums) // count))
        return found

    def _mean(self, operator: Any, x: NDArray[np.float64], scale: float, zero: int) -> Codes64:
        source, result = self.tensors[int(operator.inputs[0])], self.tensors[int(operator.outputs[0])]
        count = int(np.prod(source.shape)) // int(np.prod(result.shape))
        own = float(source.quantization.scale[0])
        multiplier, exponent = _fixed_point(np.array(own / scale))
        shift = min(count.bit_length() - 1, 32, 31 + int(exponent))
        sums = np.rint(x / own * count).astype(np.int64)
        return _rescaled(sums, (multiplier << shift) // count, exponent - shift) + zero

    def _sum(self, operator: Any, scale: float, zero: int) -> Codes64 | None:
        codes = [self.codes.get(int(index)) for index in operator.inputs]
        if codes[0] is None or codes[1] is None:
            return None
        grids = [self._grid(int(index)) for index in operator.inputs]
        twice = 2 * max(one for one, _ in grids)
        parts = [
            _rescaled((code - own) << 20, *_fixed_point(np.array(one / twice)))
            for code, (one, own) in zip(codes, grids, strict=True)
            if code is not None
        ]
        return _rescaled(parts[0] + parts[1], *_fixed_point(np.array(twice / ((1 << 20) * scale)))) + zero


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
