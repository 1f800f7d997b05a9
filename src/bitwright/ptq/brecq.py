"""BRECQ: learned rounding block by block, with errors weighted by their effect on the loss."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from bitwright.ptq.block_replay import Block, find_blocks
from bitwright.ptq.reconstruction import Reconstruct
from bitwright.ptq.step import Work


class Brecq(Reconstruct):
    """Learn rounding of weights and scales of activations, block by block, weighted by Fisher information."""

    name: ClassVar[str] = "brecq"
    learns_ranges: ClassVar[bool] = True

    chain: int = Field(default=3, ge=1, description="Maximum number of weights per block in a chain without shortcuts.")
    fisher: bool = Field(default=True, description="Weight errors by the squared gradient of the loss.")
    activation_lr: float = Field(default=1e-3, gt=0, description="Adam's learning rate for activation scales.")

    def blocks(self, work: Work) -> list[Block]:
        """Residual blocks, and parts of chains."""
        return find_blocks(work, self.chain)

    @property
    def weighs(self) -> bool:
        """The setting `fisher`."""
        return self.fisher

    @property
    def range_lr(self) -> float:
        """The setting `activation_lr`."""
        return self.activation_lr
