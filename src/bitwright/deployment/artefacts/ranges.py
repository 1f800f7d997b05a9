"""Ranges in JSON: the ends of each tensor's range (OpenPPL, STPU), and thresholds for ±127 codes (TensorRT)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from bitwright.deployment.artefacts.base import Document, Sidecar, StoredGrid, TensorGrid

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


_CODES = 127


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
