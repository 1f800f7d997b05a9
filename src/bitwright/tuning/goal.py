"""Goals of a search: allowed accuracy drops, limits and objectives; statistics to decide whether they hold.

The outcome of a trial says whether a candidate meets the goal, and by what margin.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from bitwright.core.arguments import strict
from bitwright.core.errors import PlanError, Problem, shortened
from bitwright.workload import Workload

ERROR = 1e-3
"""The maximum probability, per candidate, of stopping the evaluation of a candidate that would have passed."""


def cannot_pass(hits: int, looked_at: int, samples: int, required: int, error: float = ERROR) -> bool:
    """Whether a model with `hits` on a random part of the data can be rejected.

    The part is drawn without replacement, so the number of hits in it has a hypergeometric distribution. If the model
    had the `required` hits on all `samples`, the probability of so few hits in the part would be at most `error`. The
    test is exact: it uses no normal approximation and doesn't assume independent samples.

    >>> cannot_pass(40, 64, 1000, 900), cannot_pass(56, 64, 1000, 900)
    (True, False)
    """
    if required <= 0:
        return False
    if required > samples:
        return True
    from scipy.stats import hypergeom  # imported here because it takes most of a second

    return bool(hypergeom.cdf(hits, samples, required, looked_at) <= error)


def required_hits(required_percent: float, samples: int) -> int:
    """The smallest number of hits with a sufficient percentage.

    >>> required_hits(90.0, 1000), required_hits(89.95, 1000)
    (900, 900)
    """
    hits = max(0, math.floor(required_percent * samples / 100) - 1)
    while 100.0 * hits / samples < required_percent:
        hits += 1
    return hits


@dataclass(frozen=True, kw_only=True)
class Paired:
    """The comparison of two classifiers on the same samples."""

    only_float: int
    """Samples that only the float model classifies correctly."""
    only_quantized: int
    p_value: float
    """Exact McNemar test: the probability of such an uneven split of the differing samples if both are equally good."""


def mcnemar(only_float: int, only_quantized: int) -> Paired:
    """The exact (binomial) McNemar test.

    >>> round(mcnemar(2, 10).p_value, 4)
    0.0386
    """
    from scipy.stats import binomtest

    differing = only_float + only_quantized
    p_value = float(binomtest(only_float, differing).pvalue) if differing else 1.0
    return Paired(only_float=only_float, only_quantized=only_quantized, p_value=p_value)


Objective = Literal["latency", "size", "memory"]
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def read_bytes(value: Any) -> Any:
    """Parse a size in bytes from a number or text.

    >>> read_bytes("1.5 MB"), read_bytes(2048)
    (1500000, 2048)
    """
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*", value)
    if not found or found[2].lower() not in _UNITS:
        raise ValueError(f"{shortened(value)!r} is not a size: write 2000000, '2 MB' or '1.9 MiB'")
    size = float(found[1]) * _UNITS[found[2].lower()] if found[1].count(".") <= 1 else math.inf
    if not size < 2**60:
        raise ValueError(f"{shortened(value)!r} is not a size: write 2000000, '2 MB' or '1.9 MiB'")
    return int(size)


Bytes = Annotated[int, BeforeValidator(read_bytes), Field(gt=0, lt=2**60)]


class Drop(BaseModel):
    """The allowed decrease of a metric relative to the float model.

    >>> Drop.read("1%").limit(90.0, higher_is_better=True)
    89.1
    >>> Drop.read(0.5).limit(90.0, higher_is_better=True)
    89.5
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    relative: float | None = Field(default=None, ge=0, le=1e12)
    absolute: float | None = Field(default=None, ge=0, le=1e12)

    @model_validator(mode="after")
    def _one(self) -> Drop:
        if (self.relative is None) == (self.absolute is None):
            raise ValueError("set exactly one of relative and absolute")
        return self

    @staticmethod
    def read(value: Any) -> Any:
        """Parse a drop: "1%" is relative to float, a number is in units of the metric."""
        if isinstance(value, str):
            text = value.strip()
            try:
                return Drop(relative=float(text[:-1]) / 100) if text.endswith("%") else Drop(absolute=float(text))
            except ValueError as error:
                raise ValueError(
                    f"{value!r} is not a drop: write '1%' (relative) or 0.5 (in the metric's units)"
                ) from error
        return Drop(absolute=value) if isinstance(value, int | float) else value

    def limit(self, reference: float, *, higher_is_better: bool) -> float:
        """The worst acceptable value."""
        room = self.absolute if self.absolute is not None else abs(reference) * (self.relative or 0.0)
        return reference - room if higher_is_better else reference + room

    def __str__(self) -> str:
        return f"{self.absolute:g}" if self.absolute is not None else f"{100 * (self.relative or 0):g}%"


AnyDrop = Annotated[Drop, BeforeValidator(Drop.read)]


@strict
class Goal(BaseModel):
    """The limits that a model must meet, and the objective to minimize.

    `drop` applies to the workload's metric, or is a dict with one drop per metric. The other limits apply to the
    artefact on the real runtime; `latency_ratio` is relative to the float artefact in the same run. Several objectives
    are combined with weights, each relative to float.

    >>> Goal(drop="1%").drop_of("top1")
    Drop(relative=0.01, absolute=None)
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    drop: AnyDrop | dict[str, AnyDrop] = Field(default=Drop(relative=0.01), union_mode="left_to_right")
    lower_is_better: bool | tuple[str, ...] = False
    latency_ms: float | None = Field(default=None, gt=0, le=1e9)
    latency_ratio: float | None = Field(default=None, gt=0, le=1e9)
    size: Bytes | None = None
    memory: Bytes | None = None
    objective: Objective | dict[Objective, Annotated[float, Field(gt=0, le=1e9)]] = "latency"

    @model_validator(mode="after")
    def _one(self) -> Goal:
        if isinstance(self.drop, dict) and {"relative", "absolute"} & set(self.drop):
            raise ValueError("drop: set exactly one of relative and absolute")
        return self

    def metrics(self, default: str) -> tuple[str, ...]:
        """The metrics of the goal."""
        return tuple(self.drop) if isinstance(self.drop, dict) else (default,)

    def drop_of(self, metric: str) -> Drop:
        """The allowed drop of this metric."""
        return self.drop[metric] if isinstance(self.drop, dict) else self.drop

    def higher_is_better(self, metric: str) -> bool:
        """Whether higher values of this metric are better."""
        lower = self.lower_is_better
        return not (lower if isinstance(lower, bool) else metric in lower)

    def directed(self, workload: Workload) -> Goal:
        """The goal with the workload's directions of metrics, where the goal has none itself.

        A drop of more than 100% is an error for metrics that should be high: every model would be good enough.
        """
        goal = self
        if "lower_is_better" not in self.model_fields_set and workload.lower_is_better is not None:
            lower = tuple(name for name in self.metrics(workload.metric) if workload.less_is_better(name))
            goal = self.model_copy(update={"lower_is_better": lower})
        problems = [
            Problem(
                what="a metric that should be high can't lose more than 100%",
                where=f"drop of {name}",
                value=str(goal.drop_of(name)),
                fix="allow less, such as 1%; or set lower_is_better, if lower values are better",
                code="impossible-drop",
            )
            for name in goal.metrics(workload.metric)
            if goal.higher_is_better(name) and (goal.drop_of(name).relative or 0.0) > 1.0
        ]
        if problems:
            raise PlanError(problems, title="the goal has problems")
        return goal

    def required(self, metric: str, reference: float) -> float:
        """The worst acceptable value of a metric."""
        return self.drop_of(metric).limit(reference, higher_is_better=self.higher_is_better(metric))

    def margin(self, metric: str, reference: float, value: float) -> float:
        """How much a value exceeds the required value, in units of the metric; negative if it is insufficient."""
        if math.isnan(value):
            return -math.inf
        room = value - self.required(metric, reference)
        return room if self.higher_is_better(metric) else -room

    def worst_margin(self, default: str, reference: Mapping[str, float], values: Mapping[str, float]) -> float:
        """The smallest margin of all metrics, each relative to the float model's value."""
        return min(self.margin(m, reference[m], values[m]) / (abs(reference[m]) or 1.0) for m in self.metrics(default))

    @property
    def weights(self) -> dict[Objective, float]:
        """The objectives with their weights."""
        return dict(self.objective) if isinstance(self.objective, dict) else {self.objective: 1.0}

    @property
    def needs_memory(self) -> bool:
        """Whether the goal depends on the memory of the artefact."""
        return self.memory is not None or "memory" in self.weights


@strict
class Budget(BaseModel):
    """When to stop: after `minutes` or `trials`, whichever comes first, or at the first success (`stop="first"`).

    >>> Budget(minutes=10, trials=50)
    Budget(minutes=10.0, trials=50, stop='budget')
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    minutes: float | None = Field(default=None, gt=0, le=1e9)
    trials: int | None = Field(default=100, gt=0, le=10**9)
    stop: Literal["budget", "first"] = "budget"


class TrialOutcome(BaseModel):
    """The measurements of a candidate, which strategies use."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    passed: bool = Field(description="Whether the candidate meets the goal.")
    accurate: bool = Field(description="Whether the metrics are good enough, regardless of other limits.")
    metrics: dict[str, float] = Field(default_factory=dict, description="Measured metrics; estimates if `stopped`.")
    margin: float = Field(description="Smallest margin of all metrics, relative to float; negative if insufficient.")
    stopped: bool = Field(default=False, description="Whether evaluation stopped early because it can't pass.")
    samples: int | None = Field(default=None, description="Evaluated samples; None if the workload evaluates itself.")
    latency_ms: float | None = None
    float_latency_ms: float | None = None
    size: int | None = None
    float_size: int | None = None
    memory: int | None = None
    float_memory: int | None = None
    objective: float | None = Field(default=None, description="The value to minimize, relative to float.")
    exceeded: tuple[str, ...] = Field(default=(), description="Exceeded limits.")
    failed: str | None = Field(default=None, description="The reason why it could not be measured.")
    seconds: float = 0.0

    @property
    def latency_ratio(self) -> float | None:
        """The latency relative to the float artefact in the same run."""
        return None if self.latency_ms is None or not self.float_latency_ms else self.latency_ms / self.float_latency_ms

    @property
    def full(self) -> bool:
        """Whether it took a full evaluation."""
        return not self.stopped and self.failed is None

    @property
    def text(self) -> str:
        """The measurements in one line."""
        if self.failed is not None:
            return f"failed: {self.failed.splitlines()[0]}"
        figures = ", ".join(f"{name} {value:.4g}" for name, value in self.metrics.items() if name != "n")
        speed = "" if self.latency_ratio is None else f", {self.latency_ratio:.2f}× latency"
        limits = "".join(f", {limit}" for limit in self.exceeded)
        return f"{'about ' if self.stopped else ''}{figures}{speed}{limits}"

    def rank(self) -> tuple[float, ...]:
        """A sort key, smaller is better: candidates that pass by objective, then those nearest to passing."""
        if self.passed:
            return (0.0, self.objective if self.objective is not None else 0.0, -self.margin)
        if self.accurate:
            return (1.0, float(len(self.exceeded)), self.objective if self.objective is not None else 0.0)
        return (3.0 if self.failed else 2.0, -self.margin, 0.0)


def failure(reason: str, seconds: float = 0.0) -> TrialOutcome:
    """The outcome of a candidate that can't be measured."""
    return TrialOutcome(passed=False, accurate=False, margin=float("-inf"), failed=reason, seconds=seconds)
