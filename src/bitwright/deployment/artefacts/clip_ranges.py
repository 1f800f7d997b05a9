"""Clip ranges: thresholds for ±127 codes, which TensorRT uses as dynamic ranges."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import Field

from bitwright.deployment.artefacts.base import Document, Sidecar, StoredGrid, TensorGrid

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
        """Write activations and weights separately."""
        ends = {g.tensor: (g.weight, g.grid.ends()[1].tolist()) for g in grids}
        return ClipRangesFile(
            tensorrt=Thresholds(
                blob_range={name: end for name, (weight, end) in ends.items() if not weight},
                weight_range={name: end for name, (weight, end) in ends.items() if weight},
            )
        ).model_dump_json(indent=1)

    def read(self, text: str) -> dict[str, StoredGrid]:
        """Read activations and weights."""
        file: ClipRangesFile = self.parse(text)
        return {
            name: StoredGrid.of_ends(-np.array(end), np.array(end), -_CODES, _CODES)
            for name, end in {**file.tensorrt.blob_range, **file.tensorrt.weight_range}.items()
        }
