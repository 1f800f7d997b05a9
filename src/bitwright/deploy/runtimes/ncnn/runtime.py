"""The ncnn runtime, and the files that it loads."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from pydantic import Field
from torch import nn

from bitwright.core.documents import Strict, read_json, read_text, validated
from bitwright.core.errors import ArtefactError, Problem
from bitwright.core.files import replacing, scratch_folder, write_text
from bitwright.core.tensor_tree import slice_batch
from bitwright.deploy.artefacts.store import QDQ
from bitwright.deploy.export import export, export_float
from bitwright.deploy.integrity import Damage, compare_digests, digests_of, file_digest, text_digest
from bitwright.deploy.runtimes.base import Runtime, refused
from bitwright.deploy.runtimes.ncnn.layers import MAGIC, PRODUCTS, Net, factor
from bitwright.deploy.runtimes.ncnn.writer import convert

MOST = 2**40
Shape = Annotated[tuple[Annotated[int, Field(ge=0, le=MOST)], ...], Field(max_length=8)]


class Output(Strict):
    """An output of the model."""

    blob: str
    shape: Shape
    """Of one sample."""


class Piece(Strict):
    """Numbers in the .bin file."""

    offset: int = Field(ge=0, le=MOST)
    shape: Shape
    type: Literal["int8", "float32"]

    @property
    def end(self) -> int:
        """The first byte after it."""
        return self.offset + prod(self.shape) * np.dtype(self.type).itemsize


class Site(Strict):
    """A site that a layer rounds itself: it is seen in the blob that the layer reads."""

    blob: str
    integer: bool
    """The layer before already wrote codes."""
    scale: float = Field(gt=0)
    pads: tuple[int, int, int, int]


class Files(Strict):
    """The .json file."""

    version: Literal[1] = 1
    inputs: dict[str, Shape]
    outputs: dict[str, Output]
    layers: int = Field(ge=0, le=MOST)
    bytes: int = Field(ge=0, le=MOST)
    """Of the .bin file."""
    products: dict[str, int]
    """Convolutions and linears by type."""
    floats: tuple[str, ...] | None = None
    """Which of them multiply floats, by operator."""
    sites: dict[str, Site]
    pieces: dict[str, Piece]
    scales: dict[str, list[float]]
    """Of weights; ncnn's files have their reciprocals, from which not every scale can be had back."""

    digests: dict[str, str] = Field(default_factory=dict)
    """Of all pieces by site, and of the whole .param and .bin files; earlier versions have none."""

    def damages(self, path: Path) -> list[Damage]:
        """What isn't as it was written."""
        raw = weights_of(path).read_bytes()
        pieces = {name: _piece(raw, piece) for name, piece in self.pieces.items()}
        files = {file.suffix: file for file in (path, weights_of(path)) if file.suffix in self.digests}
        stored = {name: value for name, value in self.digests.items() if name not in files}
        found = compare_digests(stored, pieces)
        for suffix, file in files.items():
            if not found and file_digest(file) != self.digests[suffix]:
                found.append(Damage(site=file.name, what=f"{file.name} has other bytes than were exported"))
        return found

    def stored(self, path: Path) -> dict[str, NDArray[Any]]:
        """Codes, scales and biases that ncnn's own files have, by site."""
        raw = weights_of(path).read_bytes()
        found = {name: _piece(raw, piece) for name, piece in self.pieces.items()}
        for site, scale in (*self.scales.items(), *((site, [what.scale]) for site, what in self.sites.items())):
            factors = found.pop(f"{site}.factor")
            exact = np.asarray(scale, np.float32)
            own = np.array_equal(np.broadcast_to(factor(exact), factors.shape), factors)
            found[f"{site}.scale"] = exact if own else (1 / factors.astype(np.float64)).astype(np.float32)
            found[f"{site}.zero_point"] = np.zeros(found[f"{site}.scale"].shape, np.int64)
        return found


def _piece(raw: bytes, piece: Piece) -> NDArray[Any]:
    return np.frombuffer(raw, piece.type, int(np.prod(piece.shape)), piece.offset).reshape(piece.shape)


def weights_of(path: Path) -> Path:
    """The .bin file of a .param file."""
    return path.with_suffix(".bin")


def notes_of(path: Path) -> Path:
    """The .json file of a .param file."""
    return path.with_suffix(".json")


def save(net: Net, path: Path) -> None:
    """Write the three files; the .param file, which stands for them all, comes last."""
    pieces: dict[str, Piece] = {}
    position = 0
    with replacing(weights_of(path)) as temporary, temporary.open("wb") as file:
        for weight in net.weights():
            head, data = weight.head(), weight.data()
            if weight.name is not None and weight.name not in pieces:
                kind: Literal["int8", "float32"] = "int8" if weight.array.dtype == np.int8 else "float32"
                pieces[weight.name] = Piece(offset=position + len(head), shape=weight.array.shape, type=kind)
            file.write(head + data)
            position += len(head) + len(data)
    raw = weights_of(path).read_bytes()
    digests = digests_of({name: _piece(raw, piece) for name, piece in pieces.items()})
    digests |= {weights_of(path).suffix: file_digest(weights_of(path)), path.suffix: text_digest(net.param())}
    products = [layer for layer in net.layers if layer.kind in PRODUCTS]
    codes = {blob for layer in net.layers for blob in layer.writes if layer.rounds}
    notes = Files(
        inputs=net.inputs,
        outputs={name: Output(blob=blob, shape=shape) for name, (blob, shape) in net.outputs.items()},
        layers=len(net.layers),
        bytes=position,
        products={
            "int8": sum(layer.integer for layer in products),
            "float": sum(not layer.integer for layer in products),
        },
        floats=tuple(layer.name for layer in products if not layer.integer),
        sites={
            site: Site(blob=what.layer.reads[0], integer=what.layer.reads[0] in codes, scale=what.scale, pads=what.pads)
            for site, what in net.sites.items()
        },
        pieces=pieces,
        digests=digests,
        scales={site: [float(str(value)) for value in np.ravel(scale)] for site, scale in net.scales.items()},
    )
    write_text(notes_of(path), json.dumps(notes.model_dump(mode="json"), ensure_ascii=False) + "\n")
    write_text(path, net.param())


def load(path: Path) -> Files:
    """Read the .json file, and see that the others are whole: ncnn itself would read beyond their ends."""
    fix = "keep model.param, model.bin and model.json together, or export again"

    def refusal(problems: list[Problem]) -> ArtefactError:
        first = problems[0]
        what = f"ncnn can't load the artefact: {first.where}: {first.what}"
        return ArtefactError(what, where=str(path), value=first.value, fix=fix, code=first.code)

    data = read_json(notes_of(path), what="the artefact's notes", fix=fix, error=ArtefactError)
    notes = validated(Files, data, title="", error=refusal)
    text = read_text(path, what="the artefact", fix=fix, error=ArtefactError)
    try:
        size = weights_of(path).stat().st_size
        first, counts, *lines = text.splitlines()
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ArtefactError(f"ncnn can't load the artefact: {reason}", where=str(path), fix=fix) from error
    beyond = [name for name, piece in notes.pieces.items() if piece.end > notes.bytes]
    lacking = [site for site in (*notes.scales, *notes.sites) if f"{site}.factor" not in notes.pieces]
    if beyond or lacking:
        what = "weights lie beyond the end of the .bin file" if beyond else "a site has no factor"
        what = f"ncnn can't load the artefact: {what}"
        raise ArtefactError(what, where=str(path), value=(beyond or lacking)[0], fix=fix, code="invalid-value")
    whole = (str(MAGIC), str(notes.layers)) == (first, counts.split(" ")[0]) and len(lines) == notes.layers
    if not whole or size != notes.bytes:
        raise ArtefactError(
            "ncnn can't load the artefact: its files aren't whole, or not of one export",
            where=str(path),
            value=f"{len(lines)} layers of {notes.layers}, {size} bytes of {notes.bytes}",
            fix="export it again",
        )
    return notes


# Halves would be faster, but they are not the numbers of the plan.
_HALVES = ("use_fp16_packed", "use_fp16_storage", "use_fp16_arithmetic", "use_bf16_packed", "use_bf16_storage")


class Ncnn(Runtime):
    """Runs .param files, sample by sample. Beside each lie its weights (.bin) and where our sites are (.json)."""

    name = "ncnn"
    suffix: ClassVar[str] = ".param"
    activations = "int8/tensor/sym/narrow"

    @staticmethod
    def missing() -> str | None:
        """Whether the package is there."""
        return None if find_spec("ncnn") else "the package ncnn is not installed"

    @classmethod
    def write(cls, model: nn.Module, path: Path, inputs: Any) -> None:
        """Our Q/DQ graph as ncnn's layers; operators that it can't have are one error."""
        with scratch_folder() as folder:
            file = folder / "model.onnx"
            export(model, file, _one(inputs), dynamic_batch=False, artefact=QDQ)
            net = convert(ir.load(file))
            save(net, path)

    @classmethod
    def write_float(cls, model: nn.Module, path: Path, inputs: Any) -> None:
        """The float model as ncnn's layers."""
        with scratch_folder() as folder:
            net = convert(ir.load(export_float(model, folder / "model.onnx", _one(inputs), dynamic_batch=False)))
            save(net, path)

    @classmethod
    def size(cls, path: Path) -> int:
        """Layers and weights: what ncnn reads."""
        return path.stat().st_size + weights_of(path).stat().st_size

    def __init__(self, path: Path, *, threads: int | None = None) -> None:
        import ncnn

        self.files = load(path)
        self.net = ncnn.Net()
        for option in _HALVES:
            setattr(self.net.opt, option, False)
        if threads is not None:
            self.net.opt.num_threads = threads
        if self.net.load_param(str(path)) != 0 or self.net.load_model(str(weights_of(path))) != 0:
            raise ArtefactError("ncnn can't load the artefact", where=str(path), fix="export it again")
        self.inputs = tuple(self.files.inputs)
        self.outputs = tuple(self.files.outputs)
        self.batch = None

    def run(self, feed: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """One sample after the other: ncnn has no batches."""
        samples = [self._sample(feed, index) for index in range(self._count(feed))]
        return [np.stack(arrays) for arrays in zip(*samples, strict=True)]

    def _count(self, feed: dict[str, NDArray[Any]]) -> int:
        """How many samples; ncnn itself doesn't look at shapes, and would read what lies behind an array."""
        sizes = {len(array) for array in feed.values() if array.ndim}
        for name, shape in self.files.inputs.items():
            array = feed[name]
            if array.shape[1:] != shape or array.dtype != np.float32 or len(sizes) != 1 or 0 in sizes:
                found = f"{name} is {array.dtype} of shape {list(array.shape)}"
                raise refused(
                    self.name, ValueError(f"{found}, the artefact's is float32 of [any, {str(list(shape))[1:]}")
                )
        return sizes.pop()

    def _sample(self, feed: dict[str, NDArray[Any]], index: int) -> list[NDArray[Any]]:
        extractor = self._extractor(feed, index)
        return [self._extract(extractor, output.blob).reshape(output.shape) for output in self.files.outputs.values()]

    def _extractor(self, feed: dict[str, NDArray[Any]], index: int) -> Any:
        import ncnn

        extractor = self.net.create_extractor()
        for name in self.inputs:
            # a copy: ncnn's rows of channels begin at multiples of 16 bytes
            extractor.input(name, ncnn.Mat(np.ascontiguousarray(feed[name][index])).clone())
        return extractor

    def _extract(self, extractor: Any, blob: str) -> NDArray[Any]:
        status, found = extractor.extract(blob)
        if status != 0:
            raise refused(self.name, RuntimeError(f"it stops at {blob} with status {status}"))
        return np.array(found)

    def executed(self) -> dict[str, int]:
        """Layers with integer weights, as they were written: ncnn itself doesn't tell."""
        return dict(self.files.products)

    def left_in_float(self) -> tuple[str, ...] | None:
        """As they were written; files of earlier versions have no names."""
        return self.files.floats

    @classmethod
    def stored(cls, path: Path) -> dict[str, NDArray[Any]]:
        """What ncnn's own files have."""
        files = load(path)
        if not files.sites:
            raise ArtefactError(
                "this artefact has no sites", where=str(path), fix="give the quantized model's artefact"
            )
        return files.stored(path)

    @classmethod
    def damages(cls, path: Path) -> list[Damage]:
        """By the digests in the .json file."""
        return load(path).damages(path)

    @classmethod
    def probing(cls, path: Path, sites: Iterable[str]) -> Runtime:
        """The artefact itself: what is inside can be asked for."""
        return _Probe(path, sites)


class _Probe(Ncnn):
    """Layers round what they read; here ncnn's own rounding is applied to that once more, to see it."""

    def __init__(self, path: Path, sites: Iterable[str]) -> None:
        super().__init__(path)
        self.shown = {f"{site}.codes": self.files.sites[site] for site in sites if site in self.files.sites}
        self.outputs = (*self.outputs, *self.shown)

    def _sample(self, feed: dict[str, NDArray[Any]], index: int) -> list[NDArray[Any]]:
        extractor = self._extractor(feed, index)
        extractor.set_light_mode(False)  # else blobs vanish when they are read
        results = [
            self._extract(extractor, output.blob).reshape(output.shape) for output in self.files.outputs.values()
        ]
        return [*results, *(self._codes(extractor, site) for site in self.shown.values())]

    def _codes(self, extractor: Any, site: Site) -> NDArray[Any]:
        import ncnn

        found = self._extract(extractor, site.blob)
        if not site.integer:
            option = ncnn.Option()
            option.use_packing_layout = False  # NumPy can't read numbers that are packed by eights
            option.num_threads = 1
            scale = ncnn.Mat(factor(site.scale).reshape(1)).clone()
            found = np.array(ncnn.quantize_to_int8(ncnn.Mat(np.ascontiguousarray(found)).clone(), scale, option))
        if any(site.pads):
            left, right, top, bottom = site.pads
            found = np.pad(found, ((0, 0), (top, bottom), (left, right)))
        return found.astype(np.int32)


def _one(inputs: Any) -> Any:
    """One sample: ncnn's blobs have no axis for a batch."""
    return slice_batch(inputs, 0, 1)
