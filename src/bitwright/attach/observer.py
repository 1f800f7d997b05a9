"""The base of observers: what they are given and what they answer."""

from __future__ import annotations

from torch import Tensor

from bitwright.formats import Format


class Observer:
    """Finds the range of a site from what passes there. A subclass is one short file."""

    def __init__(self, *, format: Format) -> None:
        self.format = format

    def observe(self, rows: Tensor) -> None:
        """See one batch: float32, one row per scale."""
        raise NotImplementedError

    def range(self) -> tuple[Tensor, Tensor]:
        """The lowest and highest value to represent, one each per row."""
        raise NotImplementedError
