"""BRECQ: learned rounding block by block, where errors count as much as the loss feels them."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from bitwright.ptq.block_replay import Block, find_blocks
from bitwright.ptq.reconstruction import Reconstruct
from bitwright.ptq.step import Work


class Brecq(Reconstruct):
    """Learned rounding of weights and fitted ranges of activations, block by block, weighted by Fisher information."""

    name: ClassVar[str] = "brecq"
    learns_ranges: ClassVar[bool] = True

    chain: int = Field(default=3, ge=1, description="Weights of a chain without shortcuts that make one block.")
    fisher: bool = Field(default=True, description="Weight errors by the squared gradient of the loss.")
    activation_lr: float = Field(default=1e-3, gt=0, description="Adam's learning rate of activations' scales.")

    def blocks(self, work: Work) -> list[Block]:
        """Residual blocks, and pieces of chains."""
        return find_blocks(work, self.chain)

    @property
    def weighs(self) -> bool:
        """As it was set."""
        return self.fisher

    @property
    def range_lr(self) -> float:
        """As it was set."""
        return self.activation_lr
