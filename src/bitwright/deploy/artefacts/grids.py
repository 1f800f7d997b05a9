"""The numbers that artefacts carry: one grid per quantized tensor, exact to the last bit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bitwright.attach import Quantizer


@dataclass(frozen=True, eq=False, kw_only=True)
class Grid:
    """Scale and zero point (one each, or one per channel), lowest and highest code."""

    scale: NDArray[np.float32]
    zero_point: NDArray[np.int64]
    qmin: int
    qmax: int

    @property
    def bits(self) -> int:
        """The narrowest integer that holds the codes."""
        return int(self.qmax - min(self.qmin, 0)).bit_length()

    @property
    def symmetric(self) -> bool:
        """Signed, without zero points."""
        return self.qmin < 0 and not self.zero_point.any()

    def same(self, other: Grid) -> bool:
        """Equal in every bit; one channel is as good as a whole tensor."""
        return (
            self.scale.tobytes() == other.scale.tobytes()
            and np.array_equal(self.zero_point.ravel(), other.zero_point.ravel())
            and (self.qmin, self.qmax) == (other.qmin, other.qmax)
        )

    def ends(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The lowest and highest number; 24 bits of scale times 17 of codes are exact in float64."""
        scale = self.scale.astype(np.float64)
        return (self.qmin - self.zero_point) * scale, (self.qmax - self.zero_point) * scale

    @staticmethod
    def of_ends(low: NDArray[np.float64], high: NDArray[np.float64], qmin: int, qmax: int) -> Grid:
        """The inverse of `ends`."""
        scale = (high - low) / (qmax - qmin)
        zero_point = np.rint(qmin - low / scale).astype(np.int64)
        return Grid(scale=scale.astype(np.float32), zero_point=zero_point, qmin=qmin, qmax=qmax)

    def codes(self, x: NDArray[np.floating], axis: int | None) -> NDArray[np.int64]:
        """The codes of a stored weight."""
        shape = [-1 if axis is not None and i == axis % x.ndim else 1 for i in range(x.ndim)]
        scale, zero = (part if part.ndim == 0 else part.reshape(shape) for part in (self.scale, self.zero_point))
        return np.clip(np.rint(x.astype(np.float32) / scale) + zero, self.qmin, self.qmax).astype(np.int64)


@dataclass(frozen=True, eq=False, kw_only=True)
class TensorGrid:
    """A grid with the tensor that has it."""

    tensor: str
    grid: Grid
    weight: bool
    axis: int | None
    """Where channels lie, if there is a scale for each."""
    layers: tuple[str, ...]
    """The operators with a weight that read this tensor, or whose weight it is."""


def grid_of(quantizer: Quantizer) -> Grid:
    """What a quantizer rounds to."""
    grid = quantizer.grid()
    return Grid(
        scale=grid.scale.cpu().numpy().astype(np.float32),
        zero_point=grid.zero_point.cpu().numpy().astype(np.int64),
        qmin=grid.qmin,
        qmax=grid.qmax,
    )
