"""Fix positions: the number of fractional bits of each tensor, for AMD's Vitis AI."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from bitwright.deployment.artefacts.base import Document, Sidecar, StoredGrid, TensorGrid

# bits and position: value = code · 2^−position
Position = tuple[Annotated[int, Field(ge=2, le=32)], Annotated[int, Field(ge=-126, le=149)]]


class FixPositionsFile(Document):
    """[bits, position] of each tensor; value = code · 2^−position, codes start at −2^(bits−1)."""

    format: Literal["bitwright-fix-positions-1"] = "bitwright-fix-positions-1"
    param: dict[str, Position] = Field(description="Weights by initializer name.")
    output: dict[str, Position] = Field(description="Activations by tensor name, including the model's inputs.")


class FixPositions(Sidecar):
    """ONNX with fix positions in JSON."""

    suffix = ".fix-positions.json"
    document = FixPositionsFile

    def refusal(self, grid: TensorGrid) -> tuple[str, str] | None:
        """Fixed point requires a power of two per tensor and all codes."""
        mantissa, _ = np.frexp(grid.grid.scale)
        full = (grid.grid.qmin, grid.grid.qmax) == (-(1 << grid.grid.bits - 1), (1 << grid.grid.bits - 1) - 1)
        if grid.grid.scale.ndim or not grid.grid.symmetric or not full or mantissa != 0.5:
            return "fixed point requires one power of two per tensor and all signed codes", "use int8/tensor/sym/pot"
        return None

    def write(self, grids: Sequence[TensorGrid]) -> str:
        positions = {g.tensor: (g.weight, (g.grid.bits, 1 - int(np.frexp(g.grid.scale)[1]))) for g in grids}
        return FixPositionsFile(
            param={name: position for name, (weight, position) in positions.items() if weight},
            output={name: position for name, (weight, position) in positions.items() if not weight},
        ).model_dump_json(indent=1)

    def read(self, text: str) -> dict[str, StoredGrid]:
        file: FixPositionsFile = self.parse(text)
        return {
            name: StoredGrid(
                scale=np.array(np.ldexp(np.float32(1), -position)),
                zero_point=np.zeros((), np.int64),
                qmin=-(1 << bits - 1),
                qmax=(1 << bits - 1) - 1,
            )
            for name, (bits, position) in {**file.param, **file.output}.items()
        }
