"""A sidecar: the file beside a float ONNX model that tells a tool chain the grids of its tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from bitwright.attach import Quantizer
from bitwright.deploy.artefacts.grids import Grid, TensorGrid, grid_of
from bitwright.documents import Strict, parse_json, validated
from bitwright.errors import ArtefactError, Problem


class Document(Strict):
    """A JSON sidecar's contents: strict, published as JSON Schema."""


class Sidecar(ABC):
    """One file format. Adding one is a class and an entry point; a table names it in `artefacts`."""

    suffix: ClassVar[str]
    """`model.onnx` has its grids in `model` + suffix."""
    document: ClassVar[type[Document] | None] = None
    """What a JSON file may say; None for other text."""

    @abstractmethod
    def write(self, grids: Sequence[TensorGrid]) -> str:
        """The text of the file."""

    @abstractmethod
    def read(self, text: str) -> dict[str, Grid]:
        """The grids in a file, by key; bit by bit what was written."""

    def refusal(self, grid: TensorGrid) -> tuple[str, str] | None:
        """Why the format can't say this grid, and what to use instead; None if it can."""
        return None

    def keys(self, grid: TensorGrid) -> tuple[str, ...]:
        """Under which names the file has this grid."""
        return (grid.tensor,)

    def grid(self, quantizer: Quantizer) -> Grid:
        """A quantizer's numbers as this format has them."""
        return grid_of(quantizer)

    def carries(self, quantizer: Quantizer) -> bool:
        """Whether the format has words for this quantizer's levels."""
        return quantizer.exportable

    def path(self, model: Path) -> Path:
        """Where the file of a model lies."""
        return model.with_suffix(self.suffix)

    @classmethod
    def parse(cls, text: str) -> Any:
        """Read JSON as the document says; anything else is one clear error."""
        assert cls.document is not None
        fix = "export it again"
        try:
            data = parse_json(text, where=cls.suffix, what="the file with the grids", fix=fix, error=ArtefactError)
        except ArtefactError as error:
            first = error.problems[0]
            what = f"this is no file of this format: {first.what}"
            raise ArtefactError(what, where=first.where, value=first.value, fix=fix, code=first.code) from error

        def refusal(problems: list[Problem]) -> ArtefactError:
            first = problems[0]
            what = f"this is no file of this format: {first.what}"
            return ArtefactError(what, where=first.where, value=first.value, fix=fix, code=first.code)

        return validated(cls.document, data, title="", error=refusal)
