"""A candidate of the search: settings for the whole model, and overrides for single operators."""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from bitwright.backends import Choices, make_plan
from bitwright.core.formats import Format
from bitwright.core.formatting import counted
from bitwright.graph import Graph
from bitwright.graph.naming import SiteName
from bitwright.plan import Plan

FLOAT: Literal["float"] = "float"


@dataclass(frozen=True, kw_only=True)
class Base:
    """Settings for the whole model; None means the default of the backend's table."""

    weights: str | None = None
    activations: str | None = None
    observer: str | None = None
    weight_observer: str | None = None
    steps: tuple[str, ...] = ()
    samples: int | None = None

    def choices(self) -> Choices:
        """The arguments for `make_plan`."""
        chosen: Choices = {}
        if self.weights is not None:
            chosen["weights"] = self.weights
        if self.activations is not None:
            chosen["activations"] = self.activations
        if self.observer is not None:
            chosen["observer"] = self.observer
        if self.weight_observer is not None:
            chosen["weight_observer"] = self.weight_observer
        return chosen

    def __str__(self) -> str:
        words = [
            self.weights and f"weights {self.weights}",
            self.activations and f"activations {self.activations}",
            self.observer,
            self.weight_observer and f"{self.weight_observer} for weights",
            " + ".join(self.steps),
            self.samples and f"{counted(self.samples, 'sample')}",
        ]
        return ", ".join(word for word in words if word) or "defaults"


@dataclass(frozen=True, kw_only=True)
class Override:
    """Settings that differ at one operator."""

    weights: str | None = None
    activations: str | None = None
    observer: str | None = None

    def __str__(self) -> str:
        return ", ".join(word for word in (self.weights, self.activations, self.observer) if word)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to quantize the model."""

    base: Base = Base()
    float: frozenset[str] = frozenset()
    overrides: Mapping[str, Override] = field(default_factory=dict)

    def with_float(self, operators: Iterable[str]) -> Candidate:
        """A copy with exactly these operators in float."""
        return replace(self, float=frozenset(operators))

    def to_json(self) -> dict[str, Any]:
        """The representation in a store; equal candidates have equal representations."""
        return {
            "base": {k: v for k, v in asdict(self.base).items() if v not in (None, ())},
            "float": sorted(self.float),
            "overrides": {
                name: {k: v for k, v in asdict(self.overrides[name]).items() if v is not None}
                for name in sorted(self.overrides)
                if name not in self.float
            },
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Candidate:
        """The inverse of `to_json`."""
        base = dict(data["base"])
        return Candidate(
            base=Base(**{**base, "steps": tuple(base.get("steps", ()))}),
            float=frozenset(data["float"]),
            overrides={name: Override(**one) for name, one in data["overrides"].items()},
        )

    @property
    def key(self) -> str:
        """A hash that is equal for equal candidates."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        names = sorted(self.float)
        kept = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        parts = [str(self.base), f"{kept} in float" if names else "all quantized"]
        if self.overrides:
            parts.append(f"{counted(len(self.overrides), 'operator')} with other settings")
        return "; ".join(parts)

    def plan(self, graph: Graph, backend: str, *, model: str | None, choices: Choices) -> Plan:
        """The plan of this candidate; `choices` are the user's settings for all candidates."""
        kept = [*choices.get("keep_float", ()), *(glob.escape(name) for name in sorted(self.float))]
        merged: Choices = {**choices, **self.base.choices(), "keep_float": kept}
        made = make_plan(graph, backend, model=model, **merged)
        changed = {}
        for site, spec in made.sites.items():
            name = SiteName.parse(site)
            own = self.overrides.get(site.rpartition(":")[0])
            if own is None or not spec.quantizes or spec.share is not None or name.port == "bias":
                continue
            format = own.weights if name.port == "weight" else own.activations
            new = spec if format is None else replace(spec, format=Format.parse(format))
            if own.observer is not None and name.port != "weight":
                new = replace(new, observer=own.observer)
            if new != spec:
                changed[site] = replace(new, why="chosen by the search")
        return made.with_sites(changed)


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
