"""Tables of scales by tensor or layer.

`scale-text` is the text file of Tengine's uint8 tool and `ncnn-table` that of ncnn. `fix-positions` has the number of
fractional bits of each tensor (AMD's Vitis AI), and `log-levels` one offset in the log domain per tensor (HiSilicon's
NNIE).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from bitwright.core.errors import ArtefactError
from bitwright.deployment.artefacts.base import Document, Sidecar, StoredGrid, TensorGrid
from bitwright.quantizers import Quantizer

_CODES = 127
_PER_OCTAVE, _HIGHEST = 16, 127


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


class Level(Document):
    """|x| = 2^((code + offset)/16), code up to 127; `offset` is computed from `largest`."""

    largest: float = Field(gt=0)
    offset: int = Field(ge=-(2**20), le=2**20, description="round(16·log2(largest)) − 127")


class LogLevelsFile(Document):
    """Levels by tensor name in the ONNX model."""

    format: Literal["bitwright-log-levels-1"] = "bitwright-log-levels-1"
    per_octave: Literal[16] = 16
    activations: dict[str, Level]
    weights: dict[str, Level]


class LogLevels(Sidecar):
    """ONNX with log-domain offsets in JSON; in a `Grid`, scale is the largest value and zero_point the offset."""

    suffix = ".log-levels.json"
    document = LogLevelsFile

    def carries(self, quantizer: Quantizer) -> bool:
        """Only logarithmic levels are supported."""
        return quantizer.spec.quantizer == "nnie"

    def refusal(self, grid: TensorGrid) -> tuple[str, str] | None:
        """The format has one offset per tensor."""
        if grid.grid.scale.ndim or grid.grid.qmax != _HIGHEST:
            return "logarithmic levels require 8 bits and one offset per tensor", "use int8/tensor/sym"
        return None

    def grid(self, quantizer: Quantizer) -> StoredGrid:
        """The largest value and its offset, rounded as in the quantizer."""
        largest = quantizer.scale.detach().cpu()
        offset = (_PER_OCTAVE * largest.log2()).round() - _HIGHEST
        return StoredGrid(
            scale=largest.numpy().astype(np.float32),
            zero_point=offset.numpy().astype(np.int64),
            qmin=-quantizer.qmax,
            qmax=quantizer.qmax,
        )

    def write(self, grids: Sequence[TensorGrid]) -> str:
        levels = {
            g.tensor: (g.weight, Level(largest=float(g.grid.scale), offset=int(g.grid.zero_point))) for g in grids
        }
        return LogLevelsFile(
            activations={name: level for name, (weight, level) in levels.items() if not weight},
            weights={name: level for name, (weight, level) in levels.items() if weight},
        ).model_dump_json(indent=1)

    def read(self, text: str) -> dict[str, StoredGrid]:
        file: LogLevelsFile = self.parse(text)
        return {
            name: StoredGrid(
                scale=np.array(level.largest, np.float32),
                zero_point=np.array(level.offset, np.int64),
                qmin=-_HIGHEST,
                qmax=_HIGHEST,
            )
            for name, level in (file.activations | file.weights).items()
        }
