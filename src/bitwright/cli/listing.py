"""`bitwright list`: what is registered, and whether it works here."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any

import typer

from bitwright.cli.out import Out
from bitwright.cli.verb import verb
from bitwright.core.formats import FLOATS, MINIFLOATS
from bitwright.core.registry import (
    ARTEFACTS,
    BACKENDS,
    INDICATORS,
    KERNELS,
    OBSERVERS,
    PLANNERS,
    QUANTIZERS,
    RUNTIMES,
    STEPS,
    STRATEGIES,
    WORKLOADS,
    Registry,
)


class Kind(StrEnum):
    """What can be listed."""

    observers = "observers"
    quantizers = "quantizers"
    backends = "backends"
    artefacts = "artefacts"
    runtimes = "runtimes"
    workloads = "workloads"
    steps = "steps"
    strategies = "strategies"
    kernels = "kernels"
    indicators = "indicators"
    planners = "planners"
    formats = "formats"


_REGISTRIES = {
    Kind.observers: OBSERVERS,
    Kind.quantizers: QUANTIZERS,
    Kind.backends: BACKENDS,
    Kind.artefacts: ARTEFACTS,
    Kind.runtimes: RUNTIMES,
    Kind.workloads: WORKLOADS,
    Kind.steps: STEPS,
    Kind.strategies: STRATEGIES,
    Kind.kernels: KERNELS,
    Kind.indicators: INDICATORS,
    Kind.planners: PLANNERS,
}


@verb(
    "list",
    examples="""
    bitwright list
    bitwright list backends
    bitwright list runtimes --json
    """,
)
def list_(
    out: Out,
    kind: Annotated[Kind | None, typer.Argument(help="Only this kind.", show_default=False)] = None,
) -> None:
    """List what is registered, by Bitwright and by plugins, and whether it works here."""
    kinds = [kind] if kind is not None else list(Kind)
    rows = {one: list(_formats() if one is Kind.formats else _entries(_REGISTRIES[one])) for one in kinds}
    out.data(
        {
            one.value: [{"name": name, "about": about, "problem": problem} for name, about, problem in entries]
            for one, entries in rows.items()
        }
    )
    for one, entries in rows.items():
        out.table(
            [one.value, "about", "works here"],
            [(name, about, problem or "yes") for name, about, problem in entries],
        )


def _entries(registry: Registry) -> Iterator[tuple[str, str, str | None]]:
    """Name, first line of the documentation, and why it doesn't work here."""
    for name in registry.names():
        about = ""
        try:
            found = registry.get(name)
            about = found().title if registry is BACKENDS else (inspect.getdoc(found) or "").partition("\n")[0]
            problem = _problem(registry, found)
        except Exception as error:  # a plugin that can't be imported must not hide the others
            problem = f"{type(error).__name__}: {error}"
        yield name, about, problem


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


def _formats() -> Iterator[tuple[str, str, str | None]]:
    yield "float", "left as the model has it", None
    yield "intB, uintB", "integers of B = 2 to 16 bits, e.g. int8/channel/sym, uint8/tensor/asym", None
    yield "…/tensor, …/channel, …/groupN", "one scale for all, per channel, or per N elements", None
    yield "…/sym, …/asym", "zero point 0, or any", None
    yield "…/pot, …/narrow, …/adasign", "power-of-two scale; ±127; unsigned where nothing is negative", None
    for name, numbers in MINIFLOATS.items():
        yield name, f"floating point of {numbers.bits} bits, simulated" + _blocks(name), None
    for name, bits in FLOATS.items():
        if name != "float":
            yield name, f"floating point of {bits} bits", "this version doesn't simulate it"


def _blocks(name: str) -> str:
    return "; blocks of 32 share a power of two" if name.startswith("mx") else "; a scale per tensor, channel or group"
