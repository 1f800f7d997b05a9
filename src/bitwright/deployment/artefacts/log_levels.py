"""Logarithmic levels for HiSilicon's NNIE: one offset in the log domain per tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from bitwright.deployment.artefacts.base import Document, Sidecar, StoredGrid, TensorGrid
from bitwright.quantizers import Quantizer

_PER_OCTAVE, _HIGHEST = 16, 127


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
