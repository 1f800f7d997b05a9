"""`Comparison`: one model on all runtimes of this machine, versioned, as JSON."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from bitwright.report.record_parts import Accuracy, Environment, Frozen, Parity, Size, Timing


class OnRuntime(Frozen):
    """One model on one runtime, float and quantized."""

    runtime: str
    backend: str = Field(description="The table by which the model was quantized for this runtime.")
    executed: dict[str, int] | None = Field(
        description="Convolutions and matrix products by the type in which they really run. None: it doesn't tell."
    )
    left_in_float: tuple[str, ...] | None = Field(
        default=None, description="Which of them run in float, by name. None: the runtime doesn't name them."
    )
    sizes: tuple[Size, ...]
    parity: Parity
    accuracies: tuple[Accuracy, ...]
    timings: tuple[Timing, ...]


class Instance(Frozen):
    """One of several processes that ran at the same time."""

    cores: tuple[int, ...] = Field(description="The cores that it was bound to.")
    median_ms: float = Field(description="p50")
    p90_ms: float
    p99_ms: float
    throughput: float = Field(description="Samples per second of this process.")


class Together(Frozen):
    """One artefact in several processes that started together, each on cores of its own."""

    runtime: str
    variant: Literal["float", "quantized"]
    batch: int
    pinned: bool = Field(description="Whether the processes were bound to their cores.")
    runs: int = Field(description="Of each instance.")
    median_ms: float = Field(description="p50 over all runs of all instances.")
    p90_ms: float
    p99_ms: float
    throughput: float = Field(
        description="Samples per second of all instances; a round lasts as long as its slowest one."
    )
    ratio: float = Field(description="Throughput relative to the float variant in the same run.")
    instances: tuple[Instance, ...]


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
    throughput: float | None = Field(default=None, description="Of several instances; by it they are compared.")


class Comparison(Frozen):
    """All runtimes; latencies were measured in turns, in one process."""

    version: Literal[1] = 1
    workload: str
    created: str
    environment: Environment
    runtimes: tuple[OnRuntime, ...]
    skipped: tuple[Skipped, ...]
    fastest: tuple[Fastest, ...]
    together: tuple[Together, ...] = Field(default=(), description="Instead of timings, if instances were asked for.")

    def __repr__(self) -> str:
        """One line: the fastest runtime."""
        best = ", ".join(f"{one.runtime} {one.variant} {one.median_ms:.3g} ms" for one in self.fastest[:1])
        return f"<Comparison {self.workload}: {len(self.runtimes)} runtimes{', fastest ' + best if best else ''}>"

    __str__ = __repr__

    def to_dict(self) -> dict[str, Any]:
        """The results as plain data."""
        return self.model_dump(mode="json")
