"""The ncnn runtime and its files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes
from numpy.typing import NDArray
from pydantic import Field
from torch import nn

from bitwright.core.documents import read_json, read_text
from bitwright.core.errors import ArtefactError, Problem
from bitwright.core.files import replacing, scratch_folder, write_text
from bitwright.core.schemas import Strict, validated
from bitwright.core.tensor_tree import slice_batch
from bitwright.deployment.artefacts.base import QDQ
from bitwright.deployment.export import export, export_float
from bitwright.deployment.onnx_files import Damage, compare_digests, digests_of, file_digest, text_digest
from bitwright.deployment.runtimes.base import Runtime, input_error
from bitwright.deployment.runtimes.ncnn_operators import OPERATORS
from bitwright.deployment.runtimes.ncnn_writer import MAGIC, PRODUCTS, LayerWriter, Net, factor, fuse

MOST = 2**40
Shape = Annotated[tuple[Annotated[int, Field(ge=0, le=MOST)], ...], Field(max_length=8)]


class OutputBlob(Strict):
    """An output of the model."""

    blob: str
    shape: Shape
    """The shape of one sample."""


class Piece(Strict):
    """An array in the .bin file."""

    offset: int = Field(ge=0, le=MOST)
    shape: Shape
    type: Literal["int8", "float32"]

    @property
    def end(self) -> int:
        """The position after the last byte."""
        return self.offset + prod(self.shape) * np.dtype(self.type).itemsize


_OWN = ".json"  # its digest is stored in the file itself


class SiteBlob(Strict):
    """A site that a layer quantizes itself; it is observed in the layer's input blob."""

    blob: str
    integer: bool
    """Whether the previous layer already outputs codes."""
    scale: float = Field(gt=0)
    pads: tuple[int, int, int, int]


class Files(Strict):
    """The contents of the .json file."""

    version: Literal[1] = 1
    inputs: dict[str, Shape]
    outputs: dict[str, OutputBlob]
    layers: int = Field(ge=0, le=MOST)
    bytes: int = Field(ge=0, le=MOST)
    """The size of the .bin file."""
    products: dict[str, int]
    """The number of convolutions and linear layers by type."""
    floats: tuple[str, ...] | None = None
    """The names of those that run in float."""
    sites: dict[str, SiteBlob]
    pieces: dict[str, Piece]
    scales: dict[str, list[float]]
    """Scales of weights. ncnn's files contain their reciprocals, which don't always determine the scale exactly."""

    digests: dict[str, str] = Field(default_factory=dict)
    """Digests of all pieces by site, of the .param and .bin files, and of the rest of this file.

    Files of earlier versions have none.
    """

    def damages(self, path: Path) -> list[Damage]:
        """Differences from the exported contents."""
        raw = weights_of(path).read_bytes()
        pieces = {name: _piece(raw, piece) for name, piece in self.pieces.items()}
        files = {file.suffix: file for file in (path, weights_of(path)) if file.suffix in self.digests}
        stored = {name: value for name, value in self.digests.items() if name not in files}
        own = stored.pop(_OWN, None)
        found = compare_digests(stored, pieces)
        if own is not None and own != self.own_digest():
            name = notes_of(path).name
            found.append(Damage(site=name, what=f"the values of {name} changed after the export"))
        for suffix, file in files.items():
            if not found and file_digest(file) != self.digests[suffix]:
                found.append(Damage(site=file.name, what=f"the contents of {file.name} changed after the export"))
        return found

    def own_digest(self) -> str:
        """The digest of this file without digests."""
        return text_digest(json.dumps(self.model_dump(mode="json", exclude={"digests"}), sort_keys=True))

    def stored(self, path: Path) -> dict[str, NDArray[Any]]:
        """Codes, scales and biases in ncnn's files, by site."""
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
    """Write the three files; the .param file, which represents the artefact, comes last."""
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
        outputs={name: OutputBlob(blob=blob, shape=shape) for name, (blob, shape) in net.outputs.items()},
        layers=len(net.layers),
        bytes=position,
        products={
            "int8": sum(layer.integer for layer in products),
            "float": sum(not layer.integer for layer in products),
        },
        floats=tuple(layer.name for layer in products if not layer.integer),
        sites={
            site: SiteBlob(
                blob=what.layer.reads[0], integer=what.layer.reads[0] in codes, scale=what.scale, pads=what.pads
            )
            for site, what in net.sites.items()
        },
        pieces=pieces,
        digests=digests,
        scales={site: [float(str(value)) for value in np.ravel(scale)] for site, scale in net.scales.items()},
    )
    notes = notes.model_copy(update={"digests": {**digests, _OWN: notes.own_digest()}})
    write_text(notes_of(path), json.dumps(notes.model_dump(mode="json"), ensure_ascii=False) + "\n")
    write_text(path, net.param())


def load(path: Path) -> Files:
    """Read the .json file, and check that the other files are complete, because ncnn would read beyond their ends."""
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
        what = f"ncnn can't load the artefact: {reason}"
        raise ArtefactError(what, where=str(path), fix=fix, code="damaged-artefact") from error
    beyond = [name for name, piece in notes.pieces.items() if piece.end > notes.bytes]
    lacking = [site for site in (*notes.scales, *notes.sites) if f"{site}.factor" not in notes.pieces]
    if beyond or lacking:
        what = "weights lie beyond the end of the .bin file" if beyond else "a site has no factor"
        what = f"ncnn can't load the artefact: {what}"
        raise ArtefactError(what, where=str(path), value=(beyond or lacking)[0], fix=fix, code="invalid-value")
    whole = (str(MAGIC), str(notes.layers)) == (first, counts.split(" ")[0]) and len(lines) == notes.layers
    if not whole or size != notes.bytes:
        raise ArtefactError(
            "ncnn can't load the artefact: its files are incomplete, or from different exports",
            where=str(path),
            value=f"{len(lines)} layers of {notes.layers}, {size} bytes of {notes.bytes}",
            fix="export it again",
            code="damaged-artefact",
        )
    return notes


# Half precision would be faster, but would change the plan's values.
def convert(model: ir.Model) -> Net:
    """The layers of an ONNX model with a batch of one; one error lists all unsupported operators."""
    passes.ShapeInferencePass()(model)
    writer = LayerWriter(model.graph, OPERATORS)
    writer.run()
    return fuse(writer.net)


_HALVES = ("use_fp16_packed", "use_fp16_storage", "use_fp16_arithmetic", "use_bf16_packed", "use_bf16_storage")


class Ncnn(Runtime):
    """Runs .param files sample by sample, with the weights (.bin) and the sites (.json) next to them."""

    name = "ncnn"
    suffix: ClassVar[str] = ".param"
    activations = "int8/tensor/sym/narrow"

    @staticmethod
    def missing() -> str | None:
        return None if find_spec("ncnn") else "the package ncnn is not installed"

    @classmethod
    def write(cls, model: nn.Module, path: Path, inputs: Any) -> None:
        """Convert the Q/DQ graph to ncnn's layers; one error lists all unsupported operators."""
        with scratch_folder() as folder:
            file = folder / "model.onnx"
            export(model, file, _one(inputs), dynamic_batch=False, artefact=QDQ)
            net = convert(ir.load(file))
            save(net, path)

    @classmethod
    def write_float(cls, model: nn.Module, path: Path, inputs: Any) -> None:
        """Convert the float model to ncnn's layers."""
        with scratch_folder() as folder:
            net = convert(ir.load(export_float(model, folder / "model.onnx", _one(inputs), dynamic_batch=False)))
            save(net, path)

    @classmethod
    def size(cls, path: Path) -> int:
        """The size of layers and weights, which ncnn reads."""
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
            what = "ncnn can't load the artefact"
            raise ArtefactError(what, where=str(path), fix="export it again", code="artefact-not-loadable")
        self.inputs = tuple(self.files.inputs)
        self.outputs = tuple(self.files.outputs)
        self.batch = None

    def run(self, feed: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """Run one sample after the other, because ncnn has no batches."""
        samples = [self._sample(feed, index) for index in range(self._count(feed))]
        return [np.stack(arrays) for arrays in zip(*samples, strict=True)]

    def _count(self, feed: dict[str, NDArray[Any]]) -> int:
        """The number of samples; shapes are checked here, because ncnn would read beyond the end of an array."""
        sizes = {len(array) for array in feed.values() if array.ndim}
        for name, shape in self.files.inputs.items():
            array = feed[name]
            if array.shape[1:] != shape or array.dtype != np.float32 or len(sizes) != 1 or 0 in sizes:
                found = f"{name} is {array.dtype} of shape {list(array.shape)}"
                raise input_error(
                    self.name, ValueError(f"{found}, but the artefact takes float32 of [any, {str(list(shape))[1:]}")
                )
        return sizes.pop()

    def _sample(self, feed: dict[str, NDArray[Any]], index: int) -> list[NDArray[Any]]:
        extractor = self._extractor(feed, index)
        return [self._extract(extractor, output.blob).reshape(output.shape) for output in self.files.outputs.values()]

    def _extractor(self, feed: dict[str, NDArray[Any]], index: int) -> Any:
        import ncnn

        extractor = self.net.create_extractor()
        for name in self.inputs:
            # copy, because ncnn aligns channels to 16 bytes
            extractor.input(name, ncnn.Mat(np.ascontiguousarray(feed[name][index])).clone())
        return extractor

    def _extract(self, extractor: Any, blob: str) -> NDArray[Any]:
        status, found = extractor.extract(blob)
        if status != 0:
            raise input_error(self.name, RuntimeError(f"it stops at {blob} with status {status}"))
        return np.array(found)

    def executed(self) -> dict[str, int]:
        """The layers with integer weights in the file; ncnn doesn't report them."""
        return dict(self.files.products)

    def left_in_float(self) -> tuple[str, ...] | None:
        """The names in the file; files of earlier versions have none."""
        return self.files.floats

    @classmethod
    def stored(cls, path: Path) -> dict[str, NDArray[Any]]:
        """The tensors in ncnn's files."""
        files = load(path)
        if not files.sites:
            raise ArtefactError(
                "this artefact has no sites",
                where=str(path),
                fix="pass the artefact of the quantized model",
                code="no-sites",
            )
        return files.stored(path)

    @classmethod
    def damages(cls, path: Path) -> list[Damage]:
        """Check the digests in the .json file."""
        return load(path).damages(path)

    @classmethod
    def probing(cls, path: Path, sites: Iterable[str]) -> Runtime:
        """Open the same artefact: ncnn can return any blob."""
        return _NcnnProbe(path, sites)


class _NcnnProbe(Ncnn):
    """Layers quantize their inputs internally; this class repeats ncnn's quantization to obtain the codes."""

    def __init__(self, path: Path, sites: Iterable[str]) -> None:
        super().__init__(path)
        self.shown = {f"{site}.codes": self.files.sites[site] for site in sites if site in self.files.sites}
        self.outputs = (*self.outputs, *self.shown)

    def _sample(self, feed: dict[str, NDArray[Any]], index: int) -> list[NDArray[Any]]:
        extractor = self._extractor(feed, index)
        extractor.set_light_mode(False)  # otherwise blobs are freed after use
        results = [
            self._extract(extractor, output.blob).reshape(output.shape) for output in self.files.outputs.values()
        ]
        return [*results, *(self._codes(extractor, site) for site in self.shown.values())]

    def _codes(self, extractor: Any, site: SiteBlob) -> NDArray[Any]:
        import ncnn

        found = self._extract(extractor, site.blob)
        if not site.integer:
            option = ncnn.Option()
            option.use_packing_layout = False  # NumPy can't read packed values
            option.num_threads = 1
            scale = ncnn.Mat(factor(site.scale).reshape(1)).clone()
            found = np.array(ncnn.quantize_to_int8(ncnn.Mat(np.ascontiguousarray(found)).clone(), scale, option))
        if any(site.pads):
            left, right, top, bottom = site.pads
            found = np.pad(found, ((0, 0), (top, bottom), (left, right)))
        return found.astype(np.int32)


def _one(inputs: Any) -> Any:
    """One sample, because ncnn's blobs have no batch axis."""
    return slice_batch(inputs, 0, 1)
