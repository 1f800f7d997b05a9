"""Ranges and encodings in JSON: the range of each tensor, or its scale and offset.

`ranges` has the ends of each tensor's range (OpenPPL, STPU), `clip-ranges` thresholds for ±127 codes (TensorRT), and
`encodings` overrides for Qualcomm's SNPE and QNN converters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from bitwright.deployment.artefacts.base import Document, Sidecar, StoredGrid, TensorGrid

_CODES = 127
Ends = float | list[float]


class Range(Document):
    """The values of the lowest and highest code; lists have one entry per channel."""

    min: Ends
    max: Ends
    bits: int = Field(ge=2, le=32)
    qmin: int
    qmax: int
    axis: int | None = Field(default=None, description="The channel axis, if min and max are lists.")


class RangesFile(Document):
    """Ranges by tensor name in the ONNX model. Values are exact: scale = (max − min)/(qmax − qmin)."""

    format: Literal["bitwright-ranges-1"] = "bitwright-ranges-1"
    activations: dict[str, Range]
    weights: dict[str, Range]


class Ranges(Sidecar):
    """ONNX with ranges in JSON."""

    suffix = ".ranges.json"
    document = RangesFile

    def write(self, grids: Sequence[TensorGrid]) -> str:
        return RangesFile(
            activations={g.tensor: _range(g) for g in grids if not g.weight},
            weights={g.tensor: _range(g) for g in grids if g.weight},
        ).model_dump_json(indent=1, exclude_none=True)

    def read(self, text: str) -> dict[str, StoredGrid]:
        file: RangesFile = self.parse(text)
        return {
            name: StoredGrid.of_ends(np.array(r.min), np.array(r.max), r.qmin, r.qmax)
            for name, r in (file.activations | file.weights).items()
        }


def _range(tensor: TensorGrid) -> Range:
    low, high = tensor.grid.ends()
    grid = tensor.grid
    return Range(min=low.tolist(), max=high.tolist(), bits=grid.bits, qmin=grid.qmin, qmax=grid.qmax, axis=tensor.axis)


class Thresholds(Document):
    """The value of code 127; lists have one entry per output channel."""

    blob_range: dict[str, float] = Field(description="Activations by tensor name.")
    weight_range: dict[str, float | list[float]] = Field(description="Weights by initializer name.")


class ClipRangesFile(Document):
    """Thresholds for TensorRT."""

    tensorrt: Thresholds


class ClipRanges(Sidecar):
    """ONNX with thresholds in JSON."""

    suffix = ".clip-ranges.json"
    document = ClipRangesFile

    def refusal(self, grid: TensorGrid) -> tuple[str, str] | None:
        """A single number can represent only ±127 codes."""
        if not grid.grid.symmetric or (grid.grid.qmin, grid.grid.qmax) != (-_CODES, _CODES):
            return "a threshold requires codes from −127 to 127", "use int8/…/sym/narrow"
        return None

    def write(self, grids: Sequence[TensorGrid]) -> str:
        ends = {g.tensor: (g.weight, g.grid.ends()[1].tolist()) for g in grids}
        return ClipRangesFile(
            tensorrt=Thresholds(
                blob_range={name: end for name, (weight, end) in ends.items() if not weight},
                weight_range={name: end for name, (weight, end) in ends.items() if weight},
            )
        ).model_dump_json(indent=1)

    def read(self, text: str) -> dict[str, StoredGrid]:
        file: ClipRangesFile = self.parse(text)
        return {
            name: StoredGrid.of_ends(-np.array(end), np.array(end), -_CODES, _CODES)
            for name, end in {**file.tensorrt.blob_range, **file.tensorrt.weight_range}.items()
        }


class Encoding(Document):
    """One scale: code = round(x/scale) − offset, starting at 0; `min` and `max` are derived."""

    bitwidth: int = Field(ge=2, le=32)
    dtype: Literal["int"] = "int"
    is_symmetric: Literal["True", "False"]
    min: float
    max: float
    offset: int = Field(ge=-(2**32), le=2**32)
    scale: float = Field(gt=0)


Encoded = Annotated[list[Encoding], Field(min_length=1)]


class EncodingsFile(Document):
    """Lists have one entry, or one per channel."""

    version: Literal["0.6.1"] = "0.6.1"
    activation_encodings: dict[str, Encoded]
    param_encodings: dict[str, Encoded]


class Encodings(Sidecar):
    """ONNX with encodings in JSON."""

    suffix = ".encodings.json"
    document = EncodingsFile

    def refusal(self, grid: TensorGrid) -> tuple[str, str] | None:
        """Codes with a zero point must be unsigned."""
        if grid.grid.qmin < 0 and not grid.grid.symmetric:
            return "the format doesn't support signed codes with a zero point", "use uint8/…/asym, or int8/…/sym"
        return None

    def write(self, grids: Sequence[TensorGrid]) -> str:
        return EncodingsFile(
            activation_encodings={g.tensor: _encodings(g.grid) for g in grids if not g.weight},
            param_encodings={g.tensor: _encodings(g.grid) for g in grids if g.weight},
        ).model_dump_json(indent=1)

    def read(self, text: str) -> dict[str, StoredGrid]:
        file: EncodingsFile = self.parse(text)
        return {name: _grid(e) for name, e in (file.activation_encodings | file.param_encodings).items()}


def _encodings(grid: StoredGrid) -> list[Encoding]:
    low, high = grid.ends()
    return [
        Encoding(
            bitwidth=grid.bits,
            is_symmetric="True" if grid.symmetric else "False",
            min=float(a),
            max=float(b),
            offset=int(grid.qmin - zero),
            scale=float(scale),
        )
        for scale, zero, a, b in zip(*(np.ravel(p) for p in (grid.scale, grid.zero_point, low, high)), strict=True)
    ]


def _grid(encodings: list[Encoding]) -> StoredGrid:
    first = encodings[0]
    symmetric = first.is_symmetric == "True"
    codes = int(np.rint((first.max - first.min) / first.scale))
    qmin = first.offset if symmetric else 0
    scale = np.array([e.scale for e in encodings], np.float32)
    zero_point = np.array([qmin - e.offset for e in encodings], np.int64)
    if len(encodings) == 1:
        scale, zero_point = scale.reshape(()), zero_point.reshape(())
    return StoredGrid(scale=scale, zero_point=zero_point, qmin=qmin, qmax=qmin + codes)
