"""Plugin registries based on Python entry points.

Built-ins are declared in Bitwright's `pyproject.toml` and are loaded in the same way as plugins. Importers translate
configuration files of other systems. They are plugins, so that reading Bitwright's own files doesn't import them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from bitwright.core.errors import DuplicateName, UnknownName, did_you_mean


@lru_cache(maxsize=1)
def _installed(path: tuple[str, ...]) -> Any:
    """All entry points, read once for all registries."""
    return entry_points()


class Registry:
    """Objects of one kind by name. They are found in an entry-point group and loaded on first use."""

    def __init__(self, kind: str, group: str) -> None:
        self.kind = kind
        self.group = group
        self._found: dict[str, EntryPoint] | None = None
        self._objects: dict[str, Any] = {}

    def _entry_points(self) -> dict[str, EntryPoint]:
        if self._found is None:
            found: dict[str, EntryPoint] = {}
            for point in _installed(tuple(sys.path)).select(group=self.group):
                known = found.get(point.name)
                # A distribution can be on sys.path twice (editable and built). Equal values are not a conflict.
                if known is not None and known.value != point.value:
                    raise DuplicateName(
                        f"two packages register the {self.kind} {point.name!r}",
                        value=f"{known.value} and {point.value}",
                        fix="uninstall one of them or rename its entry point",
                        code="duplicate-name",
                    )
                found[point.name] = point
            self._found = found
        return self._found

    def names(self) -> list[str]:
        """All known names, sorted."""
        return sorted({*self._entry_points(), *self._objects})

    def __contains__(self, name: str) -> bool:
        return name in self._objects or name in self._entry_points()

    def get(self, name: str) -> Any:
        """The object with this name. An unknown name raises an error with similar names."""
        if name not in self._objects:
            points = self._entry_points()
            if name not in points:
                raise UnknownName(
                    f"unknown {self.kind}", value=name, fix=did_you_mean(name, self.names()), code="unknown-name"
                )
            self._objects[name] = points[name].load()
        return self._objects[name]

    def register(self, name: str, obj: Any) -> None:
        """Add an object in a notebook or test. Packages declare an entry point instead."""
        if name in self:
            raise DuplicateName(
                f"the {self.kind} {name!r} already exists",
                value=getattr(obj, "__qualname__", repr(obj)),
                fix="choose another name",
                code="duplicate-name",
            )
        self._objects[name] = obj

    def unregister(self, name: str) -> None:
        """Remove an object that was added with `register`."""
        if name not in self._objects or name in self._entry_points():
            raise UnknownName(
                f"no {self.kind} with this name was added with register()", value=name, code="unknown-name"
            )
        del self._objects[name]


OBSERVERS = Registry("observer", "bitwright.observers")
QUANTIZERS = Registry("quantizer", "bitwright.quantizers")
BACKENDS = Registry("backend", "bitwright.backends")
ARTEFACTS = Registry("artefact", "bitwright.artefacts")
RUNTIMES = Registry("runtime", "bitwright.runtimes")
NETWORKS = Registry("network", "bitwright.networks")
"""Functions (classes, dropout, norm, image_size) → module, for files of other systems that name a network."""
WORKLOADS = Registry("workload", "bitwright.workloads")
STEPS = Registry("step", "bitwright.steps")
KERNELS = Registry("kernel", "bitwright.kernels")
STRATEGIES = Registry("strategy", "bitwright.strategies")
INDICATORS = Registry("indicator", "bitwright.indicators")
PLANNERS = Registry("planner", "bitwright.planners")
IMPORTERS = Registry("importer", "bitwright.importers")
ROW_REPORTERS = Registry("row reporter", "bitwright.row_reporters")
"""Functions that write a report of each finished row of a grid: (FinishedRow, folder) → None."""
TUNING_REPORTERS = Registry("tuning reporter", "bitwright.tuning_reporters")
"""Functions (Workload, backend, seed=, progress=) that `tune` calls before the search. Each returns a function that
writes a report of the result: (Tuned, folder) → None."""


@dataclass(frozen=True, kw_only=True)
class Importer:
    """A kind of file of another system."""

    target: Literal["tune", "grid"]
    """The kind of our file that it is translated to."""
    recognizes: Callable[[Mapping[str, Any]], bool]
    translate: Callable[..., dict[str, Any]]
    """Gets the file's data and, as keywords, `where` and the options of the reader."""
    workload: Callable[..., Any] | None = None
    """Makes the workload of a file that names a network. Gets the path, and as `data` the folder of the data."""


def translated(
    data: dict[str, Any], target: Literal["tune", "grid"], *, where: str, **options: Any
) -> dict[str, Any] | None:
    """Translate the data of another system's file; None if no importer recognizes it."""
    for name in IMPORTERS.names():
        importer: Importer = IMPORTERS.get(name)
        if importer.target == target and importer.recognizes(data):
            return importer.translate(data, where=where, **options)
    return None


def registries() -> dict[str, Registry]:
    """The registries of objects that users choose by name, by kind."""
    return {
        "observers": OBSERVERS,
        "quantizers": QUANTIZERS,
        "backends": BACKENDS,
        "artefacts": ARTEFACTS,
        "runtimes": RUNTIMES,
        "workloads": WORKLOADS,
        "networks": NETWORKS,
        "steps": STEPS,
        "strategies": STRATEGIES,
        "kernels": KERNELS,
        "indicators": INDICATORS,
        "planners": PLANNERS,
    }
