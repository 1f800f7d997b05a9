"""Scale text: one line per tensor, `name scale zero_point`, as Tengine's uint8 tool reads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bitwright.core.errors import ArtefactError
from bitwright.deploy.artefacts.base import Grid, Sidecar, TensorGrid


class ScaleText(Sidecar):
    """ONNX and a text of scales; codes are uint8."""

    suffix = ".scale"

    def refusal(self, grid: TensorGrid) -> tuple[str, str] | None:
        """The text has no words for other codes."""
        if grid.grid.scale.ndim or (grid.grid.qmin, grid.grid.qmax) != (0, 255):
            return "each line is one scale of uint8 codes", "use uint8/tensor/asym"
        return None

    def write(self, grids: Sequence[TensorGrid]) -> str:
        """A double's shortest decimal text gives back every float."""
        return "".join(f"{g.tensor} {float(g.grid.scale)!r} {int(g.grid.zero_point)}\n" for g in grids)

    def read(self, text: str) -> dict[str, Grid]:
        """Line by line."""
        grids: dict[str, Grid] = {}
        for number, line in enumerate(text.splitlines(), 1):
            try:
                name, scale, zero_point = line.split()
                grids[name] = Grid(
                    scale=np.array(float(scale), np.float32),
                    zero_point=np.array(int(zero_point), np.int64),
                    qmin=0,
                    qmax=255,
                )
            except ValueError as error:
                raise ArtefactError(
                    "a line is a name, a scale and a zero point", where=f"line {number}", value=line, fix="export again"
                ) from error
        return grids
