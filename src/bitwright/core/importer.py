"""Importers translate configuration files of other systems. They are plugins, so that readers don't import them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from bitwright.core.registry import IMPORTERS


@dataclass(frozen=True, kw_only=True)
class Importer:
    """A kind of file of another system."""

    target: Literal["tune", "grid"]
    """The file of ours that it becomes."""
    recognizes: Callable[[Mapping[str, Any]], bool]
    translate: Callable[..., dict[str, Any]]
    """Gets the file's data and, as keywords, `where` and the options of the reader."""


def translated(
    data: dict[str, Any], target: Literal["tune", "grid"], *, where: str, **options: Any
) -> dict[str, Any] | None:
    """The data of a foreign file as ours; None if no importer recognizes it."""
    for name in IMPORTERS.names():
        importer: Importer = IMPORTERS.get(name)
        if importer.target == target and importer.recognizes(data):
            return importer.translate(data, where=where, **options)
    return None
