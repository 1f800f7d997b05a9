"""What is written: model.param and model.bin for ncnn, and model.json, which says where our sites are in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from bitwright.deploy.ncnn.layers import MAGIC, PRODUCTS, Net, factor
from bitwright.errors import ArtefactError
from bitwright.files import replacing, write_text


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Output(_Part):
    """An output of the model."""

    blob: str
    shape: tuple[int, ...]
    """Of one sample."""


class Piece(_Part):
    """Numbers in the .bin file."""

    offset: int
    shape: tuple[int, ...]
    type: Literal["int8", "float32"]


class Site(_Part):
    """A site that a layer rounds itself: it is seen in the blob that the layer reads."""

    blob: str
    integer: bool
    """The layer before already wrote codes."""
    scale: float
    pads: tuple[int, int, int, int]


class Files(_Part):
    """The .json file."""

    version: Literal[1] = 1
    inputs: dict[str, tuple[int, ...]]
    outputs: dict[str, Output]
    layers: int
    bytes: int
    """Of the .bin file."""
    products: dict[str, int]
    """Convolutions and linears by type."""
    floats: tuple[str, ...] | None = None
    """Which of them multiply floats, by operator."""
    sites: dict[str, Site]
    pieces: dict[str, Piece]
    scales: dict[str, list[float]]
    """Of weights; ncnn's files have their reciprocals, from which not every scale can be had back."""

    def stored(self, path: Path) -> dict[str, NDArray[Any]]:
        """Codes, scales and biases that ncnn's own files have, by site."""
        raw = weights_of(path).read_bytes()
        found = {
            name: np.frombuffer(raw, piece.type, int(np.prod(piece.shape)), piece.offset).reshape(piece.shape)
            for name, piece in self.pieces.items()
        }
        for site, scale in (*self.scales.items(), *((site, [what.scale]) for site, what in self.sites.items())):
            factors = found.pop(f"{site}.factor")
            exact = np.asarray(scale, np.float32)
            own = np.array_equal(np.broadcast_to(factor(exact), factors.shape), factors)
            found[f"{site}.scale"] = exact if own else (1 / factors.astype(np.float64)).astype(np.float32)
            found[f"{site}.zero_point"] = np.zeros(found[f"{site}.scale"].shape, np.int64)
        return found


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
        scales={site: [float(str(value)) for value in np.ravel(scale)] for site, scale in net.scales.items()},
    )
    write_text(notes_of(path), json.dumps(notes.model_dump(mode="json"), ensure_ascii=False) + "\n")
    write_text(path, net.param())


def load(path: Path) -> Files:
    """Read the .json file, and see that the others are whole: ncnn itself would read beyond their ends."""
    try:
        notes = Files.model_validate_json(notes_of(path).read_text(encoding="utf-8"))
        size = weights_of(path).stat().st_size
        first, counts, *lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValidationError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ArtefactError(
            f"ncnn can't load the artefact: {reason}",
            where=str(path),
            fix="keep model.param, model.bin and model.json together, or export again",
        ) from error
    whole = (str(MAGIC), str(notes.layers)) == (first, counts.split(" ")[0]) and len(lines) == notes.layers
    if not whole or size != notes.bytes:
        raise ArtefactError(
            "ncnn can't load the artefact: its files aren't whole, or not of one export",
            where=str(path),
            value=f"{len(lines)} layers of {notes.layers}, {size} bytes of {notes.bytes}",
            fix="export it again",
        )
    return notes
