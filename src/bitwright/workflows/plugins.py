"""`list_plugins()`: what is registered, by Bitwright and by plugins, and whether it works here."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bitwright.core.display import Summarized, Table
from bitwright.core.errors import UnknownName, did_you_mean
from bitwright.core.formats import FLOATS, MINIFLOATS
from bitwright.core.registry import BACKENDS, RUNTIMES, Registry, registries

__all__ = ["KINDS", "Plugin", "Plugins", "list_plugins"]

_FORMATS = "formats"
KINDS = (*registries(), _FORMATS)
"""What can be listed."""


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """A registered object."""

    name: str
    about: str
    problem: str | None = None
    """Why it doesn't work here."""


@dataclass(frozen=True)
class Plugins(Summarized):
    """Registered objects by kind."""

    kinds: dict[str, list[Plugin]]

    def summary(self) -> Iterator[Table]:
        """One table for each kind."""
        for kind, found in self.kinds.items():
            yield Table([kind, "about", "works here"], [(one.name, one.about, one.problem or "yes") for one in found])

    def to_dict(self) -> dict[str, Any]:
        """All of them as plain data."""
        return {kind: [asdict(one) for one in found] for kind, found in self.kinds.items()}


def list_plugins(kinds: Sequence[str] = KINDS) -> Plugins:
    """List what is registered.

    >>> [plugin.name for plugin in list_plugins(["planners"]).kinds["planners"]][:2]
    ['batches', 'fastest']
    """
    known = registries()
    for kind in kinds:
        if kind not in KINDS:
            raise UnknownName("unknown kind", value=kind, fix=did_you_mean(kind, KINDS), code="unknown-name")
    return Plugins({kind: list(_formats() if kind == _FORMATS else _entries(known[kind])) for kind in kinds})


def _entries(registry: Registry) -> Iterator[Plugin]:
    for name in registry.names():
        about, problem = "", None
        try:
            found = registry.get(name)
            about = found().title if registry is BACKENDS else (inspect.getdoc(found) or "").partition("\n")[0]
            problem = _problem(registry, found)
        except Exception as error:  # a plugin that can't be imported must not hide the others
            problem = f"{type(error).__name__}: {error}"
        yield Plugin(name=name, about=about, problem=problem)


def _problem(registry: Registry, found: Any) -> str | None:
    """A workload is not built to find out: it may train for hours."""
    if registry is RUNTIMES:
        reason: str | None = found.missing()
        return reason
    if registry is BACKENDS:
        runtime = found().runtime
        if runtime is None:
            return "plans and artefacts only; no runtime to check them on"
        return None if runtime in RUNTIMES and RUNTIMES.get(runtime).missing() is None else f"no {runtime} here"
    return None


def _formats() -> Iterator[Plugin]:
    for name, about in {
        "float": "left as the model has it",
        "intB, uintB": "integers of B = 2 to 16 bits, e.g. int8/channel/sym, uint8/tensor/asym",
        "…/tensor, …/channel, …/groupN": "one scale for all, per channel, or per N elements",
        "…/sym, …/asym": "zero point 0, or any",
        "…/pot, …/narrow, …/adasign": "power-of-two scale; ±127; unsigned where nothing is negative",
    }.items():
        yield Plugin(name=name, about=about)
    for name, numbers in MINIFLOATS.items():
        block = "blocks of 32 share a power of two" if name.startswith("mx") else "a scale per tensor, channel or group"
        yield Plugin(name=name, about=f"floating point of {numbers.bits} bits, simulated; {block}")
    for name, bits in FLOATS.items():
        if name != "float":
            problem = "this version doesn't simulate it"
            yield Plugin(name=name, about=f"floating point of {bits} bits", problem=problem)
