"""Ranges: the lowest and highest value of each tensor, for OpenPPL and STPU."""

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
        """Write activations and weights separately."""
        return RangesFile(
            activations={g.tensor: _range(g) for g in grids if not g.weight},
            weights={g.tensor: _range(g) for g in grids if g.weight},
        ).model_dump_json(indent=1, exclude_none=True)

    def read(self, text: str) -> dict[str, StoredGrid]:
        """Read activations and weights."""
        file: RangesFile = self.parse(text)
        return {
            name: StoredGrid.of_ends(np.array(r.min), np.array(r.max), r.qmin, r.qmax)
            for name, r in (file.activations | file.weights).items()
        }


def _range(tensor: TensorGrid) -> Range:
    low, high = tensor.grid.ends()
    grid = tensor.grid
    return Range(min=low.tolist(), max=high.tolist(), bits=grid.bits, qmin=grid.qmin, qmax=grid.qmax, axis=tensor.axis)
