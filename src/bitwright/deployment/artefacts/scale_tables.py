"""Tables of scales as text: `name scale zero_point` for Tengine's uint8 tool, and the factors of ncnn's table."""

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


_CODES = 127


class NcnnTable(Sidecar):
    """ONNX with ncnn's table: `layer_param_0` has the factors 1/scale of a weight, `layer` that of an input."""

    suffix = ".table"

    def refusal(self, grid: TensorGrid) -> tuple[str, str] | None:
        """A factor requires codes from −127 to 127 and a layer with a weight."""
        if not grid.grid.symmetric or (grid.grid.qmin, grid.grid.qmax) != (-_CODES, _CODES):
            return "a factor requires codes from −127 to 127", "use int8/…/sym/narrow"
        if not grid.layers:
            return "only layers with a weight have factors", "keep this site in float"
        return None

    def keys(self, grid: TensorGrid) -> tuple[str, ...]:
        """Keys are layers, not tensors."""
        return tuple(f"{layer}_param_0" if grid.weight else layer for layer in grid.layers)

    def write(self, grids: Sequence[TensorGrid]) -> str:
        """Write weights first. The double 1/scale reproduces the float scale exactly."""
        lines = []
        for g in sorted(grids, key=lambda g: not g.weight):
            factors = " ".join(repr(float(1 / np.float64(scale))) for scale in np.ravel(g.grid.scale))
            lines += [f"{key} {factors}\n" for key in self.keys(g)]
        return "".join(lines)

    def read(self, text: str) -> dict[str, StoredGrid]:
        """Parse the file line by line."""
        grids: dict[str, StoredGrid] = {}
        for number, line in enumerate(text.splitlines(), 1):
            try:
                name, first, *more = line.split()
                scale = np.array([1 / float(factor) for factor in (first, *more)]).astype(np.float32)
            except (ValueError, ZeroDivisionError) as error:
                raise ArtefactError(
                    "a line must contain a name and its factors",
                    where=f"line {number}",
                    value=line,
                    fix="export again",
                    code="invalid-line",
                ) from error
            scale = scale if len(scale) > 1 else scale.reshape(())
            grids[name] = StoredGrid(scale=scale, zero_point=np.zeros(scale.shape, np.int64), qmin=-_CODES, qmax=_CODES)
        return grids
