"""The base classes of artefacts that store a float ONNX model and the grids of its tensors in a second file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from bitwright.core.documents import Strict, parse_json, validated
from bitwright.core.errors import ArtefactError, Problem
from bitwright.quantizers import Quantizer


@dataclass(frozen=True, eq=False, kw_only=True)
class StoredGrid:
    """Scale and zero point (one per tensor or channel), and the lowest and highest code."""

    scale: NDArray[np.float32]
    zero_point: NDArray[np.int64]
    qmin: int
    qmax: int

    @property
    def bits(self) -> int:
        """The number of bits of the narrowest integer for the codes."""
        return int(self.qmax - min(self.qmin, 0)).bit_length()

    @property
    def symmetric(self) -> bool:
        """Whether codes are signed and all zero points are 0."""
        return self.qmin < 0 and not self.zero_point.any()

    def same(self, other: StoredGrid) -> bool:
        """Whether both are bit-identical; a single channel is equal to a tensor."""
        return (
            self.scale.tobytes() == other.scale.tobytes()
            and np.array_equal(self.zero_point.ravel(), other.zero_point.ravel())
            and (self.qmin, self.qmax) == (other.qmin, other.qmax)
        )

    def ends(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The lowest and highest value; exact in float64 (24 bits of scale times 17 of codes)."""
        scale = self.scale.astype(np.float64)
        return (self.qmin - self.zero_point) * scale, (self.qmax - self.zero_point) * scale

    @staticmethod
    def of_ends(low: NDArray[np.float64], high: NDArray[np.float64], qmin: int, qmax: int) -> StoredGrid:
        """The inverse of `ends`."""
        scale = (high - low) / (qmax - qmin)
        zero_point = np.rint(qmin - low / scale).astype(np.int64)
        return StoredGrid(scale=scale.astype(np.float32), zero_point=zero_point, qmin=qmin, qmax=qmax)

    def codes(self, x: NDArray[np.floating], axis: int | None) -> NDArray[np.int64]:
        """The codes of a stored weight."""
        shape = [-1 if axis is not None and i == axis % x.ndim else 1 for i in range(x.ndim)]
        scale, zero = (part if part.ndim == 0 else part.reshape(shape) for part in (self.scale, self.zero_point))
        return np.clip(np.rint(x.astype(np.float32) / scale) + zero, self.qmin, self.qmax).astype(np.int64)


@dataclass(frozen=True, eq=False, kw_only=True)
class TensorGrid:
    """A grid and its tensor."""

    tensor: str
    grid: StoredGrid
    weight: bool
    axis: int | None
    """The axis of the channels, if there is one scale per channel."""
    layers: tuple[str, ...]
    """The operators that read this tensor, or that it is the weight of."""


def grid_of(quantizer: Quantizer) -> StoredGrid:
    """The grid of a quantizer."""
    grid = quantizer.grid()
    return StoredGrid(
        scale=grid.scale.cpu().numpy().astype(np.float32),
        zero_point=grid.zero_point.cpu().numpy().astype(np.int64),
        qmin=grid.qmin,
        qmax=grid.qmax,
    )


class Document(Strict):
    """The schema of a JSON sidecar, which is published as JSON Schema."""


class Sidecar(ABC):
    """One file format. A new format is a class and an entry point; backend tables list it in `artefacts`."""

    suffix: ClassVar[str]
    """The grids of `model.onnx` are stored in `model` + suffix."""
    document: ClassVar[type[Document] | None] = None
    """The schema of a JSON file; None for other text."""

    @abstractmethod
    def write(self, grids: Sequence[TensorGrid]) -> str:
        """The text of the file."""

    @abstractmethod
    def read(self, text: str) -> dict[str, StoredGrid]:
        """The grids in a file, by key, bit-identical to those written."""

    def refusal(self, grid: TensorGrid) -> tuple[str, str] | None:
        """Why the format can't store this grid, and the fix; None if it can."""
        return None

    def keys(self, grid: TensorGrid) -> tuple[str, ...]:
        """The keys of this grid in the file."""
        return (grid.tensor,)

    def grid(self, quantizer: Quantizer) -> StoredGrid:
        """The grid of a quantizer as this format stores it."""
        return grid_of(quantizer)

    def carries(self, quantizer: Quantizer) -> bool:
        """Whether the format can store this quantizer's levels."""
        return quantizer.exportable

    def path(self, model: Path) -> Path:
        """The path of the file for a model."""
        return model.with_suffix(self.suffix)

    @classmethod
    def parse(cls, text: str) -> Any:
        """Parse and validate JSON."""
        assert cls.document is not None
        fix = "export it again"
        try:
            data = parse_json(text, where=cls.suffix, what="the file with the grids", fix=fix, error=ArtefactError)
        except ArtefactError as error:
            first = error.problems[0]
            what = f"not a file of this format: {first.what}"
            raise ArtefactError(what, where=first.where, value=first.value, fix=fix, code=first.code) from error

        def refusal(problems: list[Problem]) -> ArtefactError:
            first = problems[0]
            what = f"not a file of this format: {first.what}"
            return ArtefactError(what, where=first.where, value=first.value, fix=fix, code=first.code)

        return validated(cls.document, data, title="", error=refusal)
