"""Artefacts that consist of a float ONNX model and a sidecar, a second file with the grids of its tensors."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter

from bitwright.core.arguments import strict
from bitwright.core.documents import parse_json, read_text
from bitwright.core.errors import ArtefactError, ExportError, PlanError, Problem
from bitwright.core.registry import ARTEFACTS
from bitwright.core.schemas import Strict, validated
from bitwright.deployment.onnx_files import (
    compare_digests,
    load_onnx,
    onnx_tensors,
    read_digests,
    structure_damages,
    text_digest,
)
from bitwright.deployment.qdq import MARKER, Recorded, permutation_of, set_constant
from bitwright.quantizers import Attachment, Quantizer


@dataclass(frozen=True, eq=False, kw_only=True)
class StoredGrid:
    """Scale and zero point (one per tensor or channel), and the lowest and highest code."""

    scale: NDArray[np.float32]
    zero_point: NDArray[np.int64]
    qmin: int
    qmax: int

    @property
    def bits(self) -> int:
        """The number of bits of the narrowest integer for the codes."""
        return int(self.qmax - min(self.qmin, 0)).bit_length()

    @property
    def symmetric(self) -> bool:
        """Whether codes are signed and all zero points are 0."""
        return self.qmin < 0 and not self.zero_point.any()

    def same(self, other: StoredGrid) -> bool:
        """Whether both are bit-identical; a single channel is equal to a tensor."""
        return (
            self.scale.tobytes() == other.scale.tobytes()
            and np.array_equal(self.zero_point.ravel(), other.zero_point.ravel())
            and (self.qmin, self.qmax) == (other.qmin, other.qmax)
        )

    def ends(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The lowest and highest value; exact in float64 (24 bits of scale times 17 of codes)."""
        scale = self.scale.astype(np.float64)
        return (self.qmin - self.zero_point) * scale, (self.qmax - self.zero_point) * scale

    @staticmethod
    def of_ends(low: NDArray[np.float64], high: NDArray[np.float64], qmin: int, qmax: int) -> StoredGrid:
        """The inverse of `ends`."""
        scale = (high - low) / (qmax - qmin)
        zero_point = np.rint(qmin - low / scale).astype(np.int64)
        return StoredGrid(scale=scale.astype(np.float32), zero_point=zero_point, qmin=qmin, qmax=qmax)

    def codes(self, x: NDArray[np.floating], axis: int | None) -> NDArray[np.int64]:
        """The codes of a stored weight."""
        shape = [-1 if axis is not None and i == axis % x.ndim else 1 for i in range(x.ndim)]
        scale, zero = (part if part.ndim == 0 else part.reshape(shape) for part in (self.scale, self.zero_point))
        return np.clip(np.rint(x.astype(np.float32) / scale) + zero, self.qmin, self.qmax).astype(np.int64)


@dataclass(frozen=True, eq=False, kw_only=True)
class TensorGrid:
    """A grid and its tensor."""

    tensor: str
    grid: StoredGrid
    weight: bool
    axis: int | None
    """The axis of the channels, if there is one scale per channel."""
    layers: tuple[str, ...]
    """The operators that read this tensor, or that it is the weight of."""


def grid_of(quantizer: Quantizer) -> StoredGrid:
    """The grid of a quantizer."""
    grid = quantizer.grid()
    return StoredGrid(
        scale=grid.scale.cpu().numpy().astype(np.float32),
        zero_point=grid.zero_point.cpu().numpy().astype(np.int64),
        qmin=grid.qmin,
        qmax=grid.qmax,
    )


class Document(Strict):
    """The schema of a JSON sidecar, which is published as JSON Schema."""


class Sidecar(ABC):
    """One file format. A new format is a class and an entry point; backend tables list it in `artefacts`."""

    suffix: ClassVar[str]
    """The grids of `model.onnx` are stored in `model` + suffix."""
    document: ClassVar[type[Document] | None] = None
    """The schema of a JSON file; None for other text."""

    @abstractmethod
    def write(self, grids: Sequence[TensorGrid]) -> str:
        """The text of the file."""

    @abstractmethod
    def read(self, text: str) -> dict[str, StoredGrid]:
        """The grids in a file, by key, bit-identical to those written."""

    def refusal(self, grid: TensorGrid) -> tuple[str, str] | None:
        """Why the format can't store this grid, and the fix; None if it can."""
        return None

    def keys(self, grid: TensorGrid) -> tuple[str, ...]:
        """The keys of this grid in the file."""
        return (grid.tensor,)

    def grid(self, quantizer: Quantizer) -> StoredGrid:
        """The grid of a quantizer as this format stores it."""
        return grid_of(quantizer)

    def carries(self, quantizer: Quantizer) -> bool:
        """Whether the format can store this quantizer's levels."""
        return quantizer.exportable and not quantizer.spec.format.dynamic

    def path(self, model: Path) -> Path:
        """The path of the file for a model."""
        return model.with_suffix(self.suffix)

    @classmethod
    def parse(cls, text: str) -> Any:
        """Parse and validate JSON."""
        assert cls.document is not None
        fix = "export it again"
        try:
            data = parse_json(text, where=cls.suffix, what="the file with the grids", fix=fix, error=ArtefactError)
        except ArtefactError as error:
            first = error.problems[0]
            what = f"not a file of this format: {first.what}"
            raise ArtefactError(what, where=first.where, value=first.value, fix=fix, code=first.code) from error

        def refusal(problems: list[Problem]) -> ArtefactError:
            first = problems[0]
            what = f"not a file of this format: {first.what}"
            return ArtefactError(what, where=first.where, value=first.value, fix=fix, code=first.code)

        return validated(cls.document, data, title="", error=refusal)


KIND, KEYS = "bitwright.artefact", "bitwright.keys"  # metadata of the ONNX file
QDQ = "qdq"
Keys = dict[str, tuple[str, str, int | None]]  # site → key in the sidecar, tensor in the model, channel axis


@dataclass(frozen=True, eq=False, kw_only=True)
class Stored:
    """The grid of one site and, for a weight, its stored codes (a linear weight may be transposed)."""

    grid: StoredGrid
    codes: NDArray[np.int64] | None = None


def kind_of_artefact(path: Path) -> str:
    """The kind of artefact of an ONNX file."""
    return str(load_onnx(path).metadata_props.get(KIND, QDQ))


@strict
def read_artefact(path: str | Path) -> dict[str, Stored]:
    """Grids and codes of an exported artefact, by site."""
    path = Path(path)
    kind = kind_of_artefact(path)
    model = load_onnx(path)
    if kind == QDQ:
        return _from_pairs(model)
    sidecar: Sidecar = ARTEFACTS.get(kind)()
    beside = sidecar.path(path)
    text = _sidecar_text(beside)
    _refuse_damage(model, sidecar, text, beside)
    grids = sidecar.read(text)
    weights = {str(name): value.const_value for name, value in model.graph.initializers.items()}
    stored: dict[str, Stored] = {}
    for site, (key, tensor, axis) in _keys(model, path).items():
        if key not in grids:
            what = "the file with the grids doesn't contain this grid"
            raise ArtefactError(what, where=site, value=key, fix="export again", code="damaged-artefact")
        weight = weights.get(tensor)
        codes = None if weight is None or kind == "log-levels" else grids[key].codes(weight.numpy(), axis)
        stored[site] = Stored(grid=grids[key], codes=codes)
    return stored


def _refuse_damage(model: ir.Model, sidecar: Sidecar, text: str, beside: Path) -> None:
    """Compare both files with the digests in the model's metadata."""
    digests = read_digests(model)
    expected = digests.pop(sidecar.suffix, None)
    found = compare_digests(digests, onnx_tensors(model)) + structure_damages(model)
    problems = [Problem(what=one.what, where=one.site, fix="export again", code="damaged-artefact") for one in found]
    if expected is not None and expected != text_digest(text):
        what = "the file with the grids doesn't belong to the exported model"
        problems.append(Problem(what=what, where=str(beside), fix="export again", code="damaged-artefact"))
    if problems:
        raise PlanError(problems, title="the artefact is damaged")


def _keys(model: ir.Model, path: Path) -> Keys:
    """The key in the sidecar, the tensor in the model and the channel axis of each site."""
    fix = "export it again"
    where = f"{path}, {KEYS}"
    data = parse_json(
        model.metadata_props.get(KEYS, ""), where=where, what="the artefact", fix=fix, error=ArtefactError
    )
    kind = TypeAdapter(dict[str, tuple[str, str, Annotated[int, Field(ge=-8, le=8)] | None]])
    return validated(kind, data, title=f"{where} has problems", fix=fix)


def read_sidecar(kind: str, path: Path) -> dict[str, StoredGrid]:
    """The grids in the sidecar of an artefact, by key."""
    sidecar: Sidecar = ARTEFACTS.get(kind)()
    return sidecar.read(_sidecar_text(path))


def _sidecar_text(path: Path) -> str:
    if not path.is_file():
        what, fix = "the file with the grids is missing", "export again, and keep both files together"
        raise ArtefactError(what, where=str(path), fix=fix, code="missing-file")
    return read_text(path, what="the file with the grids", fix="export it again", error=ArtefactError)


def _from_pairs(model: ir.Model) -> dict[str, Stored]:
    """Read scales and zero points from initializers named by site."""
    constants = {
        str(name): value.const_value.numpy() for name, value in model.graph.initializers.items() if value.const_value
    }
    stored: dict[str, Stored] = {}
    for name, scale in constants.items():
        if not name.endswith(".scale"):
            continue
        site = name.removesuffix(".scale")
        zero = constants[f"{site}.zero_point"] if f"{site}.zero_point" in constants else np.zeros(scale.shape, np.int32)
        kind = ir.DataType.from_numpy(zero.dtype)
        low, high = (
            (-(1 << kind.bitwidth - 1), (1 << kind.bitwidth - 1) - 1)
            if kind.is_signed()
            else (0, (1 << kind.bitwidth) - 1)
        )
        codes = constants.get(f"{site}.codes")
        stored[site] = Stored(
            grid=StoredGrid(scale=scale, zero_point=zero.astype(np.int64), qmin=low, qmax=high),
            codes=None if codes is None else codes.astype(np.int64),
        )
    return stored


@dataclass
class _QuantizedTensor:
    quantizer: Quantizer
    value: ir.Value
    weight: bool
    axis: int | None
    sites: list[str] = field(default_factory=list)


def write_plain(
    model: ir.Model, attachment: Attachment, recorded: Recorded, sidecar: Sidecar
) -> tuple[list[TensorGrid], Keys]:
    """Replace all markers, in place; returns the grids for the sidecar and the keys of all sites."""
    writer = _PlainWriter(model, attachment, recorded)
    writer.run()
    passes.RemoveUnusedNodesPass()(model)
    passes.RemoveUnusedOpsetsPass()(model)
    return writer.grids(sidecar)


class _PlainWriter:
    def __init__(self, model: ir.Model, attachment: Attachment, recorded: Recorded) -> None:
        self.graph, self.attachment, self.recorded = model.graph, attachment, recorded
        self.found: dict[ir.Value, _QuantizedTensor] = {}
        self.constants: dict[str, ir.Value] = {}

    def run(self) -> None:
        for node in list(self.graph):
            if (node.domain, node.op_type) == MARKER:
                site, source, output = node.attributes["site"].as_string(), node.inputs[0], node.outputs[0]
                assert source is not None
                value = self._value(site, source)
                if value.type is None:  # outputs of the model keep their type
                    value.type, value.shape = output.type, output.shape
                ir.convenience.replace_all_uses_with(output, value, replace_graph_outputs=True)
                self.graph.remove(node, safe=True)
        for found in self.found.values():
            if found.weight:
                self._turn(found)
                self._name_layers(found)

    def _value(self, site: str, source: ir.Value) -> ir.Value:
        if site in self.recorded.constants:
            return self._initializer(site, self.recorded.constants[site].float().cpu().numpy())
        owner = self.attachment.shared.get(site, site)
        quantizer = self.attachment.quantizers[owner]
        if site not in self.recorded.values:
            self._remember(source, quantizer, site, weight=False)
            return source
        key = owner if quantizer.weight else site
        if key not in self.constants:
            array = self.recorded.values[site].float().cpu().numpy()
            if source.name in self.graph.initializers and len(source.uses()) == 1:
                set_constant(source, array)  # keeps the parameter's name
                self.constants[key] = source
            else:
                self.constants[key] = self._initializer(site, array)
        if quantizer.port != "bias":  # its grid is the product of two others
            self._remember(self.constants[key], quantizer, site, weight=True)
        return self.constants[key]

    def _remember(self, value: ir.Value, quantizer: Quantizer, site: str, *, weight: bool) -> None:
        axis = quantizer.layout.axis if quantizer.layout.granularity == "channel" else None
        known = self.found.setdefault(value, _QuantizedTensor(quantizer, value, weight, axis))
        if known.quantizer is not quantizer:
            raise ExportError(
                "this artefact has one grid per tensor, but two sites quantize this tensor differently",
                where=f"{known.sites[0]} and {site}",
                fix="share the quantizer (share: …), or export the artefact qdq",
                code="conflicting-grids",
            )
        known.sites.append(site)

    def _initializer(self, name: str, array: NDArray[np.generic]) -> ir.Value:
        base = name = re.sub(r"[^A-Za-z0-9_.]", "_", name.replace(":", "."))
        count = 0
        while name in self.graph.initializers:
            count += 1
            name = f"{base}_{count}"
        value = ir.Value(name=name, const_value=ir.tensor(array, name=name))
        value.shape, value.dtype = ir.Shape(array.shape), ir.DataType.from_numpy(array.dtype)
        self.graph.register_initializer(value)
        return value

    def _turn(self, found: _QuantizedTensor) -> None:
        """Apply transposes of a weight now, because tools expect weights directly at the operator."""
        users = [use.node for use in found.value.uses()]
        assert found.value.const_value is not None
        array = found.value.const_value.numpy()
        turns = [permutation_of(node, array.ndim) for node in users]
        if not turns or turns[0] is None or any(turn != turns[0] for turn in turns):
            return
        set_constant(found.value, array.transpose(turns[0]))
        if found.axis is not None:
            found.axis = turns[0].index(found.axis % array.ndim)
        for node in users:
            ir.convenience.replace_all_uses_with(node.outputs[0], found.value)
            self.graph.remove(node, safe=True)

    def _name_layers(self, found: _QuantizedTensor) -> None:
        """Name operators with a weight as in the plan."""
        for use, site in zip(found.value.uses(), found.sites, strict=False):
            use.node.name = site.rpartition(":")[0]

    def grids(self, sidecar: Sidecar) -> tuple[list[TensorGrid], Keys]:
        """All grids; raises an error that lists every grid the format can't store."""
        grids: list[TensorGrid] = []
        keys: Keys = {}
        problems: list[Problem] = []
        for value, found in self.found.items():
            grid = TensorGrid(
                tensor=str(value.name),
                grid=sidecar.grid(found.quantizer),
                weight=found.weight,
                axis=found.axis,
                layers=tuple(dict.fromkeys(use.node.name for use in value.uses() if use.node.name)),
            )
            reason = sidecar.refusal(grid)
            if found.quantizer.layout.granularity == "group":
                reason = ("this artefact doesn't support scales per group", "use channel or tensor")
            if reason is not None:
                format = str(found.quantizer.format)
                what, fix = reason
                where = found.sites[0]
                problems.append(Problem(what=what, where=where, value=format, fix=fix, code="unsupported-format"))
                continue
            grids.append(grid)
            keys.update(dict.fromkeys(found.sites, (sidecar.keys(grid)[0], grid.tensor, grid.axis)))
        if problems:
            raise PlanError(problems, title="the artefact can't store these grids")
        return grids, keys
