"""Base classes of observers: ranges, histograms, moments, and scales."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from bitwright.core.formats import Format


class Observer:
    """Finds the range of a site from what passes there. A subclass is one short file."""

    # A range that leaves something out on purpose (outliers, what costs more than it is worth) is an estimate, and the
    # mean of several processes' estimates is a better one; their extremes would bring back what was left out.
    merge: ClassVar[Literal["extremes", "mean"]] = "mean"
    """How ranges that several processes found become one."""

    by_batch: ClassVar[bool] = True
    """Whether the range depends on how the data is cut into batches; if not, calibration may cut it smaller."""

    shows_infinities: ClassVar[bool] = False
    """Whether the range isn't finite if any number that was seen isn't; if not, data is looked through before."""

    def __init__(self, *, format: Format) -> None:
        self.format = format

    def observe(self, rows: Tensor) -> None:
        """See one batch: float32, one row per scale."""
        raise NotImplementedError

    def range(self) -> tuple[Tensor, Tensor]:
        """The lowest and highest value to represent, one each per row."""
        raise NotImplementedError
