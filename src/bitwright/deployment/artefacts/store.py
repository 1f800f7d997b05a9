"""Read the grids and codes of an artefact, by site, bit-identical to the export."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter

from bitwright.core.arguments import strict
from bitwright.core.documents import parse_json, read_text, validated
from bitwright.core.errors import ArtefactError, PlanError, Problem
from bitwright.core.registry import ARTEFACTS
from bitwright.deployment.artefacts.base import Sidecar, StoredGrid
from bitwright.deployment.integrity import compare_digests, onnx_tensors, read_digests, structure_damages, text_digest
from bitwright.deployment.onnx_files import load_onnx

KIND, KEYS = "bitwright.artefact", "bitwright.keys"  # metadata of the ONNX file
QDQ = "qdq"


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


def _keys(model: ir.Model, path: Path) -> dict[str, tuple[str, str, int | None]]:
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
