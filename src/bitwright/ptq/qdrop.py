"""QDrop: block by block, with the rounding of activations left out here and there, so that what is found is robust."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from bitwright.graph.recording import Values
from bitwright.ptq.block_replay import Replay
from bitwright.ptq.brecq import Brecq


class QDrop(Brecq):
    """As BRECQ, with activations that are quantized only in part, by chance, also those that come into the block."""

    name: ClassVar[str] = "qdrop"

    fisher: bool = Field(default=False, description="Weight errors by the squared gradient of the loss.")
    drop: float = Field(default=0.5, ge=0, le=1, description="Share of the numbers that stay float.")

    def given(self, replay: Replay, index: int, generator: torch.Generator) -> Values:
        """Numbers of the quantized and of the float model, mixed."""
        exact = replay.values(index, "float")
        rounded = replay.values(index, "quantized")
        return {source: self.quantize(exact[source], x, generator) for source, x in rounded.items()}

    def quantize(self, x: Tensor, rounded: Tensor, generator: torch.Generator) -> Tensor:
        """One of the two for each number."""
        if not x.is_floating_point():
            return rounded
        return torch.where(torch.rand(x.shape, generator=generator).to(x.device) < self.drop, x, rounded)
