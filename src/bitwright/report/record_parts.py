"""What `bitwright score` found, as a part of a record."""

from __future__ import annotations

from math import isfinite
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from bitwright.core.arguments import strict
from bitwright.sensitivity import Scores, SiteScore, Suggestion


class Frozen(BaseModel):
    """A part of a record: nothing unknown in it, and nothing changes."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Environment(Frozen):
    """Where it was measured."""

    bitwright: str
    python: str
    platform: str
    cpu: str
    cpu_features: tuple[str, ...]
    cores: int
    threads: int = Field(description="Threads of torch.")
    packages: dict[str, str]


@strict
class Accuracy(Frozen):
    """The workload's metric for one way to run the model."""

    where: str = Field(description='"float", "simulated", or the name of a runtime.')
    metric: str
    value: float
    samples: int | None = None
    lower_is_better: bool = False


class Size(Frozen):
    """Bytes of one form of the model."""

    name: str
    bytes: int


class Timing(Frozen):
    """Latency of one artefact; both variants of a runtime were measured in turns."""

    runtime: str
    variant: Literal["float", "quantized"]
    batch: int
    threads: int
    median_ms: float = Field(description="p50")
    p10_ms: float
    p90_ms: float
    p99_ms: float | None = Field(default=None, description="None in reports that were made before it was measured.")
    runs: int
    ratio: float = Field(description="Median relative to the float variant in the same run.")


class Parity(Frozen):
    """What a runtime computes against what the simulated model computes."""

    runtime: str
    passed: bool
    samples: int
    sqnr_db: float | None = Field(description="None: no deviation at all.")
    max_error: float
    top1_agreement: float | None
    first_divergence: str | None


class FloatDistance(Frozen):
    """What the simulated model computes against what the float model computes."""

    samples: int
    sqnr_db: float | None = Field(description="Of the output that is farthest away. None: no deviation at all.")
    top1_agreement: float | None
    far: bool = Field(description="Whether the model has lost what it computed.")
    worst: dict[str, float | None] = Field(description="SQNR of the sites with the largest error of their own.")


class Warned(Frozen):
    """Something to know about the result."""

    code: str | None
    what: str
    where: str | None = None
    fix: str | None = None


class Histogram(Frozen):
    """How often numbers fall between `low` and `high`, in bins of equal width.

    The ends are those of the grid and from an eighth of its span beyond, as far as the first batch reaches; where the
    grid is far wider than the numbers, they are those of the numbers. What is further out is in the outermost bins.
    """

    low: float
    high: float
    counts: tuple[int, ...]


class SiteRow(Frozen):
    """One quantizer at one site."""

    site: str
    format: str
    observer: str
    quantizer: str
    guard: str | None
    share: str | None
    scales: int = Field(description="How many scales there are: one, or one per channel or group.")
    scale_min: float
    scale_max: float
    zero_point_min: int
    zero_point_max: int
    low: float = Field(description="The lowest number that the grid has.")
    high: float
    clipped: float | None = Field(description="Share of numbers beyond the grid's ends. None: never reached.")
    sqnr_db: float | None = Field(description="The cost of this quantizer alone. None: nothing, or never reached.")
    why: str
    seen_low: float | None = Field(default=None, description="The least number that reached it. None: not looked at.")
    seen_high: float | None = None
    histogram: Histogram | None = Field(default=None, description="None: not asked for, or never reached.")


class FloatOperator(Frozen):
    """An operator that stayed in float, and the reason."""

    operator: str
    kind: str
    why: str


class StepRow(Frozen):
    """A PTQ step that was run, with the settings that differ from its defaults."""

    step: str
    units: int = Field(description="Layers, blocks or pairs that it worked on.")
    seconds: float = Field(description="In the process that finished it.")
    skipped: dict[str, str] = Field(default_factory=dict, description="What it left alone, and why.")


class Sites(Frozen):
    """Sites of a prepared model at which the same thing ran, as read from that model."""

    quantizer: str = Field(description="The class: bitwright.quantizers.lsq.Lsq.")
    format: str = Field(description="The format in force, e.g. int4/channel/sym.")
    sites: int
    levels: int = Field(description="The most different values that one scale of any of them gave.")


class Executed(Frozen):
    """What a prepared and trained model says of itself."""

    weights: tuple[Sites, ...]
    activations: tuple[Sites, ...]
    biases: int = Field(default=0, description="Biases on the grid of the integer accumulator.")
    folding: dict[str, int] = Field(
        default_factory=dict, description="Folding strategy → how many norms; empty: norms run as they are."
    )
    kept_float: dict[str, str] = Field(default_factory=dict, description="Operators that stayed float, and why.")


class OnDevice(Frozen):
    """The same model on the backend's runtime."""

    runtime: str
    accuracy: float | None = None
    gap: float | None = Field(default=None, description="On the runtime minus simulated, in points.")
    kinds: dict[str, int] | None = Field(
        default=None, description="Products by the type in which the runtime really ran them; None: it doesn't tell."
    )
    reason: str | None = Field(default=None, description="Why there is no accuracy.")


class GridRow(Frozen):
    """One row of a grid of `bitwright bench`."""

    id: str = Field(description="The hash of `config`.")
    config: dict[str, Any] = Field(description="A grid of this row alone: `bitwright bench` runs it as it is.")
    executed: Executed
    device: OnDevice | None = Field(default=None, description="None: not asked for, or the backend has no runtime.")
    beyond: str | None = Field(
        default=None, description="Where the backend's scheme was simulated at a width that it can't run: which."
    )
    notes: tuple[str, ...] = ()
    start: str = Field(description="The fingerprint of the float weights.")


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


class SiteSensitivity(Frozen):
    """What becomes of the model when this one site is quantized and all else is float."""

    site: str
    format: str
    sqnr_db: float | None = Field(description="Of the numbers at the site. None: no error.")
    output_error: float
    cosine_distance: float
    loss_change: float | None = Field(description="None: the workload has no loss.")


class Kept(Frozen):
    """The metric with so many operators in float."""

    operators: tuple[str, ...]
    metric: float


class Suggested(Frozen):
    """What keeping the worst operators in float would bring."""

    metric: str
    before: float
    trials: tuple[Kept, ...]
    operators: tuple[str, ...] = Field(description="The suggestion; empty: nothing is won.")


class Sensitivity(Frozen):
    """Sites, worst first."""

    samples: int
    sites: tuple[SiteSensitivity, ...]
    together: SiteSensitivity
    suggestion: Suggested | None = None


@strict
def sensitivity(scores: Scores, suggestion: Suggestion | None = None, metric: str = "") -> Sensitivity:
    """The part of a record."""
    return Sensitivity(
        samples=scores.samples,
        sites=tuple(_row(score) for score in scores.sites),
        together=_row(scores.together),
        suggestion=None
        if suggestion is None
        else Suggested(
            metric=metric,
            before=suggestion.before,
            trials=tuple(Kept(operators=tuple(t.operators), metric=t.metric) for t in suggestion.trials),
            operators=tuple(suggestion.operators),
        ),
    )


def _row(score: SiteScore) -> SiteSensitivity:
    return SiteSensitivity(
        site=score.site,
        format=score.format,
        sqnr_db=score.sqnr_db if score.sqnr_db is not None and isfinite(score.sqnr_db) else None,
        output_error=score.output_error,
        cosine_distance=score.cosine_distance,
        loss_change=score.loss_change,
    )
