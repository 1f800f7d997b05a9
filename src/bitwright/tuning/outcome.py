"""What became of one candidate."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Outcome(BaseModel):
    """What was measured; everything that a strategy may know."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    passed: bool = Field(description="All that the goal demands holds.")
    accurate: bool = Field(description="The metrics are good enough, whatever the limits say.")
    metrics: dict[str, float] = Field(default_factory=dict, description="Estimates if `stopped`.")
    margin: float = Field(description="The smallest margin of all metrics, relative to float; negative: too bad.")
    stopped: bool = Field(default=False, description="Given up on a part of the data: it can't pass.")
    samples: int | None = Field(default=None, description="On how many samples; None: the workload's own evaluation.")
    latency_ms: float | None = None
    float_latency_ms: float | None = None
    size: int | None = None
    float_size: int | None = None
    memory: int | None = None
    float_memory: int | None = None
    objective: float | None = Field(default=None, description="What is to be small, relative to float.")
    exceeded: tuple[str, ...] = Field(default=(), description="Limits that don't hold.")
    failed: str | None = Field(default=None, description="Why it could not be measured.")
    seconds: float = 0.0

    @property
    def latency_ratio(self) -> float | None:
        """Relative to the float artefact in the same run."""
        return None if self.latency_ms is None or not self.float_latency_ms else self.latency_ms / self.float_latency_ms

    @property
    def full(self) -> bool:
        """Whether it took a whole evaluation."""
        return not self.stopped and self.failed is None

    def rank(self) -> tuple[float, ...]:
        """Smaller is better: what passes, by the objective; else what is nearest to passing."""
        if self.passed:
            return (0.0, self.objective if self.objective is not None else 0.0, -self.margin)
        if self.accurate:
            return (1.0, float(len(self.exceeded)), self.objective if self.objective is not None else 0.0)
        return (3.0 if self.failed else 2.0, -self.margin, 0.0)


def failure(reason: str, seconds: float = 0.0) -> Outcome:
    """A candidate that can't be measured."""
    return Outcome(passed=False, accurate=False, margin=float("-inf"), failed=reason, seconds=seconds)
