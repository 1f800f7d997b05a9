"""`Comparison`: one model on all runtimes of this machine, versioned, as JSON."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from bitwright.report.record import Accuracy, Environment, Frozen, Parity, Size, Timing


class OnRuntime(Frozen):
    """One model on one runtime, float and quantized."""

    runtime: str
    backend: str = Field(description="The table by which the model was quantized for this runtime.")
    executed: dict[str, int] | None = Field(
        description="Convolutions and matrix products by the type in which they really run. None: it doesn't tell."
    )
    sizes: tuple[Size, ...]
    parity: Parity
    accuracies: tuple[Accuracy, ...]
    timings: tuple[Timing, ...]


class Skipped(Frozen):
    """A runtime that wasn't measured."""

    runtime: str
    why: str


class Fastest(Frozen):
    """The pick for one batch size, among runtimes that agree with the simulated model."""

    batch: int
    runtime: str
    variant: Literal["float", "quantized"]
    median_ms: float


class Comparison(Frozen):
    """All runtimes; latencies were measured in turns, in one process."""

    version: Literal[1] = 1
    workload: str
    created: str
    environment: Environment
    runtimes: tuple[OnRuntime, ...]
    skipped: tuple[Skipped, ...]
    fastest: tuple[Fastest, ...]
