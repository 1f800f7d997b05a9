"""What `bitwright tune` and `bitwright train` went through, as parts of a record."""

from __future__ import annotations

from pydantic import Field

from bitwright.report.parts import Frozen


class Trial(Frozen):
    """One candidate of a search."""

    number: int = Field(description="From 1.")
    candidate: str
    passed: bool
    metrics: dict[str, float] = Field(description="Estimates if `stopped`.")
    stopped: bool = Field(description="Given up on a part of the data.")
    failed: str | None = Field(description="Why it could not be measured.")
    latency_ratio: float | None = Field(description="Relative to float in the same run.")
    size: int | None
    pareto: bool = Field(description="No other candidate beats it in metric, latency and size at once.")
    best: bool
    seconds: float


class Tuning(Frozen):
    """A search until a goal holds."""

    metric: str
    lower_is_better: bool = False
    strategy: str
    goal: str
    limit: float | None = Field(description="The worst value of the metric that meets the goal.")
    met_goal: bool | None
    stopped_because: str
    float_metrics: dict[str, float] = Field(description="Of the float model; empty: not measured.")
    float_size: int | None
    full_evaluations: int
    notes: tuple[str, ...]
    trials: tuple[Trial, ...]


class Training(Frozen):
    """A training run."""

    metric: str
    precision: str
    metrics: tuple[dict[str, float], ...] = Field(description="After each epoch.")
    best_epoch: int | None = Field(description="From 1.")
    steps: int
    processes: int
    config_hash: str
    settings: dict[str, str] = Field(description="Those that differ from the defaults.")
    init: str | None = Field(description="The weights that it began with.")
    notes: tuple[str, ...]
