"""What is written: model.param and model.bin for ncnn, and model.json, which says where our sites are in them."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from bitwright.deploy.integrity import Damage, compare_digests, digests_of, file_digest, text_digest
from bitwright.deploy.ncnn.layers import MAGIC, PRODUCTS, Net, factor
from bitwright.documents import Strict, read_json, read_text, validated
from bitwright.errors import ArtefactError, Problem
from bitwright.files import replacing, write_text

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
