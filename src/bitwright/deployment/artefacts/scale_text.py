"""Scale text: one line per tensor, `name scale zero_point`, for Tengine's uint8 tool."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bitwright.core.errors import ArtefactError
from bitwright.deployment.artefacts.base import Sidecar, StoredGrid, TensorGrid


class ScaleText(Sidecar):
    """ONNX with a text file of scales; codes are uint8."""

    suffix = ".scale"

    def refusal(self, grid: TensorGrid) -> tuple[str, str] | None:
        """The format supports only uint8 codes per tensor."""
        if grid.grid.scale.ndim or (grid.grid.qmin, grid.grid.qmax) != (0, 255):
            return "the format requires uint8 codes with one scale per tensor", "use uint8/tensor/asym"
        return None

    def write(self, grids: Sequence[TensorGrid]) -> str:
        """Write one line per tensor; the shortest decimal of a double reproduces every float."""
        return "".join(f"{g.tensor} {float(g.grid.scale)!r} {int(g.grid.zero_point)}\n" for g in grids)

    def read(self, text: str) -> dict[str, StoredGrid]:
        """Parse the file line by line."""
        grids: dict[str, StoredGrid] = {}
        for number, line in enumerate(text.splitlines(), 1):
            try:
                name, scale, zero_point = line.split()
                grids[name] = StoredGrid(
                    scale=np.array(float(scale), np.float32),
                    zero_point=np.array(int(zero_point), np.int64),
                    qmin=0,
                    qmax=255,
                )
            except ValueError as error:
                raise ArtefactError(
                    "a line must contain a name, a scale and a zero point",
                    where=f"line {number}",
                    value=line,
                    fix="export again",
                    code="invalid-line",
                ) from error
        return grids
