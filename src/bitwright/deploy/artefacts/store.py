"""Read an artefact's quantization back: grids and codes, by site, bit by bit what was exported."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.deploy.artefacts.grids import Grid
from bitwright.deploy.artefacts.sidecar import Sidecar
from bitwright.errors import ArtefactError
from bitwright.registry import ARTEFACTS

KIND, KEYS = "bitwright.artefact", "bitwright.keys"  # metadata of the ONNX file
QDQ = "qdq"


@dataclass(frozen=True, eq=False, kw_only=True)
class Stored:
    """One site: its grid and, for a weight, its codes as the file has them (a linear's may be transposed)."""

    grid: Grid
    codes: NDArray[np.int64] | None = None


def kind_of_artefact(path: Path) -> str:
    """Which artefact an ONNX file belongs to."""
    try:
        return str(ir.load(path).metadata_props.get(KIND, QDQ))
    except Exception as error:  # protobuf's and the operating system's own
        raise ArtefactError(
            "not an ONNX file", where=str(path), fix="give the path of an exported .onnx file"
        ) from error


def read_artefact(path: str | Path) -> dict[str, Stored]:
    """Grids and codes of an exported artefact, by site."""
    path = Path(path)
    kind = kind_of_artefact(path)
    model = ir.load(path)
    if kind == QDQ:
        return _from_pairs(model)
    sidecar: Sidecar = ARTEFACTS.get(kind)()
    beside = sidecar.path(path)
    if not beside.is_file():
        raise ArtefactError(
            "the file with the grids is missing", where=str(beside), fix="export again, keep both files"
        )
    grids = sidecar.read(beside.read_text(encoding="utf-8"))
    weights = {str(name): value.const_value for name, value in model.graph.initializers.items()}
    stored: dict[str, Stored] = {}
    for site, (key, tensor, axis) in json.loads(model.metadata_props[KEYS]).items():
        if key not in grids:
            raise ArtefactError("the file with the grids lacks this one", where=site, value=key, fix="export again")
        weight = weights.get(tensor)
        codes = None if weight is None or kind == "log-levels" else grids[key].codes(weight.numpy(), axis)
        stored[site] = Stored(grid=grids[key], codes=codes)
    return stored


def _from_pairs(model: ir.Model) -> dict[str, Stored]:
    """Scales and zero points lie in initializers that are named by their site."""
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
            grid=Grid(scale=scale, zero_point=zero.astype(np.int64), qmin=low, qmax=high),
            codes=None if codes is None else codes.astype(np.int64),
        )
    return stored
