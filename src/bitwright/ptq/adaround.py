"""AdaRound: learn, layer by layer, which weights to round up or down."""

from __future__ import annotations

from typing import ClassVar

from bitwright.ptq.block_replay import Block, find_layers
from bitwright.ptq.reconstruction import Reconstruct
from bitwright.ptq.step import Work


class AdaRound(Reconstruct):
    """Minimizes the error of each layer's output, on quantized inputs, relative to the float model."""

    name: ClassVar[str] = "adaround"

    def blocks(self, work: Work) -> list[Block]:
        """Each layer is one block."""
        return find_layers(work)
