"""The base class of observers."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from bitwright.core.formats import Format


class Observer:
    """Finds the range of a site from its inputs."""

    # A range that excludes outliers is an estimate. The mean of several processes' estimates is a better one, while
    # their extremes would include the outliers again.
    merge: ClassVar[Literal["extremes", "mean"]] = "mean"
    """How to merge the ranges of several processes."""

    by_batch: ClassVar[bool] = True
    """Whether the range depends on the division into batches. If not, calibration may use smaller batches."""

    shows_infinities: ClassVar[bool] = False
    """Whether NaN and infinity in the input make the range non-finite. If not, the data is checked separately."""

    def __init__(self, *, format: Format) -> None:
        self.format = format

    def observe(self, rows: Tensor) -> None:
        """Observe one batch: float32, one row per scale."""
        raise NotImplementedError

    def range(self) -> tuple[Tensor, Tensor]:
        """The lowest and highest value to represent, per row."""
        raise NotImplementedError
