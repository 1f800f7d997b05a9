"""AdaRound: each layer's weights round so that the layer's output, on quantized inputs, is that of the float model."""

from __future__ import annotations

from typing import ClassVar

from bitwright.ptq.block_replay import Block, find_layers
from bitwright.ptq.reconstruction import Reconstruct
from bitwright.ptq.step import Work


class AdaRound(Reconstruct):
    """Learned rounding of weights, layer by layer."""

    name: ClassVar[str] = "adaround"

    def blocks(self, work: Work) -> list[Block]:
        """Layers."""
        return find_layers(work)
