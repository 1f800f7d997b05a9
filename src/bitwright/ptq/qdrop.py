"""QDrop: reconstruction block by block that randomly skips the quantization of activations, for robustness."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from bitwright.graph.recording import Values
from bitwright.ptq.block_replay import Replay
from bitwright.ptq.brecq import Brecq


class QDrop(Brecq):
    """BRECQ with randomly dropped quantization of activations, including the inputs of each block."""

    name: ClassVar[str] = "qdrop"

    fisher: bool = Field(default=False, description="Weight errors by the squared gradient of the loss.")
    drop: float = Field(default=0.5, ge=0, le=1, description="Share of the values that stay in float.")

    def given(self, replay: Replay, index: int, generator: torch.Generator) -> Values:
        """A random mix of values from the quantized and the float model."""
        exact = replay.values(index, "float")
        rounded = replay.values(index, "quantized")
        return {source: self.quantize(exact[source], x, generator) for source, x in rounded.items()}

    def quantize(self, x: Tensor, rounded: Tensor, generator: torch.Generator) -> Tensor:
        """Choose the float or the rounded value for each element at random."""
        if not x.is_floating_point():
            return rounded
        return torch.where(torch.rand(x.shape, generator=generator).to(x.device) < self.drop, x, rounded)
