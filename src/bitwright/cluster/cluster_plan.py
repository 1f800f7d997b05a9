"""`bitwright.plan_cluster`: choose a precision for each operator on each kind of device of a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from logging import getLogger
from math import isfinite
from typing import Any, TypedDict, Unpack

from bitwright.cluster.cluster import Cluster
from bitwright.cluster.cluster_cost_model import ClusterCostModel
from bitwright.cluster.cost_lookup import check_layout, explain_batch_mismatch
from bitwright.cluster.cost_model import FLOAT
from bitwright.cluster.memory import MemoryLimit, describe_limits
from bitwright.cluster.planners import Allocation, uniform
from bitwright.cluster.planners.precision import over_limits
from bitwright.core import formatting
from bitwright.core.arguments import strict
from bitwright.core.display import Progress, Summarized, Table
from bitwright.core.errors import BitwrightError, PlanError, log_warnings
from bitwright.core.registry import PLANNERS
from bitwright.core.tensor_tree import batch_size
from bitwright.plan import Plan
from bitwright.profiling.device_profile import DeviceProfile, step_uncertainty, uncertain_times, uncertainty_text
from bitwright.profiling.profiled_step import WorkloadStep
from bitwright.sensitivity import OperatorScores, spec_of
from bitwright.workload import Workload

__all__ = ["PlannerComparison", "compare_planners", "plan_cluster"]

log = getLogger("bitwright")
_ALTERNATIVES = ("recover", "recover+split", "batches", "float")
_SMALL_SHARE = 32  # a device with a smaller share of the largest batch contributes little
_FASTER = 1.03  # smaller ratios are within the error of predictions

Penalties = OperatorScores | Mapping[str, Mapping[str, float]]


class StepOptions(TypedDict, total=False):
    """How the step of a workload is recorded and which profiles it uses; see `plan_cluster`."""

    profiles: Mapping[str, DeviceProfile] | None
    batch: int | None
    channels_last: bool
    keep_float: Sequence[str]


@strict
def plan_cluster(
    workload: Workload,
    cluster: Cluster,
    scores: Penalties,
    *,
    planner: str = "recover",
    profiles: Mapping[str, DeviceProfile] | None = None,
    batch: int | None = None,
    channels_last: bool = False,
    keep_float: Sequence[str] = (),
) -> Plan:
    """Plan low-precision training on a cluster: one section of the plan for each kind of device.

    `scores` contains the penalty of each operator in each format: the result of `score_operators`, or a mapping
    `{operator: {format: penalty}}`. `planner` is a registered name; see `bitwright list planners`. `profiles` gives the
    profiles of the cluster's device kinds; without it they are loaded from the files that the cluster names. Operators
    that match a pattern of `keep_float` stay in float.

    >>> from bitwright import Cluster, load_workload, plan_cluster, profile
    >>> workload = load_workload("digits-untrained")
    >>> device = profile(workload, published="nvidia-t4", kernels=["int8"], batch=8)
    >>> cluster = Cluster.of({"t4": 1})
    >>> scores = {"conv1": {"int8": 0.1}, "conv2": {"int8": 0.2}}
    >>> plan = plan_cluster(workload, cluster, scores, profiles={"t4": device}, batch=8)
    >>> list(plan.devices)
    ['t4']
    """
    PLANNERS.get(planner)  # reject an unknown name before any work
    model = _cost_model(
        workload,
        cluster,
        scores,
        profiles=profiles,
        batch=batch,
        channels_last=channels_last,
        keep_float=keep_float,
    )
    chosen = PLANNERS.get(planner)(model)
    for problem in over_limits(model, chosen):
        log.warning("%s doesn't fit: %s", planner, problem)
    return _to_plan(model, chosen, workload.name, channels_last=channels_last)


@dataclass(frozen=True, kw_only=True)
class PlannerComparison(Summarized):
    """The result of one planner next to those of other planners and of uniform precisions."""

    planner: str
    plan: Plan
    """The plan of the chosen planner."""
    allocations: Mapping[str, Allocation]
    """Results by planner, or by `all FORMAT` for a uniform precision."""
    failed: Mapping[str, PlanError]
    """Planners that found no plan that fits."""
    limits: Mapping[str, MemoryLimit | None]
    """The memory limit of each kind of device."""
    kinds: Mapping[str, int]
    """The number of devices of each kind."""
    operators: int
    """The number of operators with a choice of formats."""
    fitting: Sequence[str]
    """Planners with a result that fits, and the chosen one."""
    uncertainty: float = 0.0
    """Relative uncertainty of the times in the profiles: the largest of all kinds. Smaller gains don't count."""

    @property
    def chosen(self) -> Allocation:
        """The result of the chosen planner."""
        return self.allocations[self.planner]

    @property
    def gains_nothing(self) -> bool:
        """Whether the chosen result is float everywhere with equal batches."""
        return not any(self.chosen.low.values()) and len(set(self.chosen.batches.values())) == 1

    @property
    def faster(self) -> tuple[str, float] | None:
        """The planner with the fastest step and its speedup, if it is clearly faster than the chosen one."""
        best = min(self.fitting, key=lambda name: self.allocations[name].seconds)
        ratio = self.chosen.seconds / self.allocations[best].seconds
        return (best, ratio) if ratio > max(_FASTER, 1 + self.uncertainty) else None

    @property
    def doubtful_gain(self) -> float | None:
        """The speedup over float, if it is smaller than the uncertainty of the times."""
        if "float" not in self.allocations or self.gains_nothing:
            return None
        ratio = self.allocations["float"].seconds / self.chosen.seconds
        return ratio if ratio <= 1 + self.uncertainty else None

    def summary(self) -> Iterator[Table | str]:
        """One row for each planner, and what follows for the training."""
        yield Table(
            ["planner", "#step", "#penalty", "low-precision operators", "batches", "memory of a process"],
            [
                *(self._row(name, one) for name, one in self.allocations.items()),
                *((name, "–", "–", "no plan fits", "–", e.problems[0].what) for name, e in self.failed.items()),
            ],
        )
        if any(self.limits.values()):
            yield f"memory limit of a process: {describe_limits(self.limits)}"
        if self.gains_nothing:
            advice = "" if self.faster else "; train without a plan"
            yield f"low precision gives no speedup on this cluster: the plan is float everywhere{advice}"
        if self.uncertainty and self.doubtful_gain is not None:
            spread = uncertainty_text(self.uncertainty)
            gain = f"{self.doubtful_gain:.2f} times as fast as float"
            yield f"the plan may give no speedup: it is predicted to be {gain}, but the times are uncertain by {spread}"
        if self.faster is not None:
            best, ratio = self.faster
            yield f"{best} is {ratio:.2g} times as fast: --planner {best}"
        total = sum(self.chosen.batches.values())
        for kind, size in self.chosen.batches.items():
            if size * _SMALL_SHARE < max(self.chosen.batches.values()):
                yield f"{kind} gets only {size} of {total} samples: consider training without it"

    def _row(self, name: str, one: Allocation) -> Sequence[object]:
        return (
            f"{name} (chosen)" if name == self.planner else name,
            f"{1e3 * one.seconds:.2f} ms",
            f"{one.penalty:.3g}",
            ", ".join(f"{kind} {count} of {self.operators}" for kind, count in one.low.items()),
            ", ".join(f"{kind} {size}" for kind, size in one.batches.items()),
            ", ".join(f"{kind} {_memory_text(used, self.limits[kind])}" for kind, used in one.memory.items()),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON-compatible data."""
        return {
            "planner": self.planner,
            "uncertainty": self.uncertainty if isfinite(self.uncertainty) else None,
            "limits": {
                kind: None if one is None else {"total": one.total, "reserve": one.reserve, "usable": one.usable}
                for kind, one in self.limits.items()
            },
            "allocations": {
                name: {
                    "seconds": one.seconds,
                    "penalty": one.penalty,
                    "batches": dict(one.batches),
                    "low": one.low,
                    "memory": dict(one.memory),
                    "plans": {kind: dict(plan) for kind, plan in one.plans.items()},
                }
                for name, one in self.allocations.items()
            },
            "failed": {name: [str(problem) for problem in error.problems] for name, error in self.failed.items()},
        }


def _memory_text(used: int, limit: MemoryLimit | None) -> str:
    over = f" (of {formatting.size(limit.usable)}: too much)" if limit is not None and not limit.holds(used) else ""
    return f"{formatting.size(used)}{over}"


@strict
def compare_planners(
    workload: Workload,
    cluster: Cluster,
    scores: Penalties,
    *,
    planner: str = "recover",
    progress: Progress | None = None,
    **options: Unpack[StepOptions],
) -> PlannerComparison:
    """Plan as `plan_cluster` does, and compare the result with other planners and with uniform precisions.

    A failure of another planner is part of the result; a failure of the chosen one raises an error.
    """
    PLANNERS.get(planner)
    model = _cost_model(workload, cluster, scores, **options)
    rows: dict[str, Allocation] = {}
    failed: dict[str, PlanError] = {}
    names = list(dict.fromkeys([planner, *_ALTERNATIVES]))
    for number, name in enumerate(names):
        if progress is not None:
            progress(number, len(names), f"planning: {name}")
        try:
            rows[name] = PLANNERS.get(name)(model)
        except PlanError as error:
            if name == planner:
                raise
            failed[name] = error
    for format in model.computes:
        rows[f"all {format}"] = uniform(model, format)
    for problem in over_limits(model, rows[planner]):
        log.warning("%s doesn't fit: %s", planner, problem)
    return PlannerComparison(
        planner=planner,
        plan=_to_plan(model, rows[planner], workload.name, channels_last=options.get("channels_last", False)),
        allocations=rows,
        failed=failed,
        limits={kind: model.memory_limit(kind) for kind in model.kinds},
        kinds=model.kinds,
        operators=len(model.operators),
        fitting=[n for n in rows if n in PLANNERS and (n == planner or not over_limits(model, rows[n]))],
        uncertainty=max(step_uncertainty(model.profiles[kind], model.graph) for kind in model.kinds),
    )


def _cost_model(
    workload: Workload,
    cluster: Cluster,
    scores: Penalties,
    *,
    profiles: Mapping[str, DeviceProfile] | None = None,
    batch: int | None = None,
    channels_last: bool = False,
    keep_float: Sequence[str] = (),
) -> ClusterCostModel:
    penalties = scores.values if isinstance(scores, OperatorScores) else scores
    known = dict(profiles) if profiles is not None else cluster.profiles()
    check_layout(known, channels_last=channels_last)
    step = WorkloadStep.of(workload, batch, channels_last=channels_last)
    formats = sorted({format for own in penalties.values() for format in own if format != FLOAT})
    with explain_batch_mismatch(known, batch_size(step.batch)):
        model = ClusterCostModel(
            step.record(),
            known,
            cluster,
            penalties,
            {format: spec_of(format) for format in formats},
            keep_float=keep_float,
            smaller=step.record_half(),
        )
    _check(model, penalties, formats, keep_float)
    return model


def _to_plan(model: ClusterCostModel, chosen: Allocation, name: str, *, channels_last: bool) -> Plan:
    plan = model.to_plan(chosen, model=name)
    devices = {kind: replace(device, channels_last=channels_last) for kind, device in plan.devices.items()}
    return replace(plan, devices=devices)


def _check(
    model: ClusterCostModel,
    penalties: Mapping[str, Mapping[str, float]],
    formats: Sequence[str],
    keep_float: Sequence[str],
) -> None:
    """Warn about uncertain times and ignored scores; raise if no operator has a choice of formats."""
    for kind in model.kinds:
        log_warnings(uncertain_times(model.profiles[kind], model.graph, where=kind))
    names = set(model.graph.position)
    unknown = [name for name in penalties if name not in names]
    scored = [name for name in penalties if name in names]
    if model.operators:
        if unknown:
            log.warning(
                "the scores contain %s, which the model doesn't have: they may belong to another model", _some(unknown)
            )
        if model.unscored:
            log.warning("%s stay in float: the scores don't include them", _some(model.unscored))
        proportional = ", ".join(kind for kind in model.kinds if kind not in model.predictor.smaller)
        if proportional:
            fix = "run `bitwright profile --half-batch` to measure another batch size"
            log.warning("the times of %s are assumed to be proportional to the batch size: %s", proportional, fix)
    elif not scored:
        raise BitwrightError(
            f"the scores belong to another model: they contain {_some(unknown)}, the model has {_some(sorted(names))}",
            where="scores",
            fix="compute them for this model: bitwright score WORKLOAD --indicator gradient-variance --formats int8",
            code="scores-of-another-model",
        )
    elif all(name in model.kept for name in scored):
        raise BitwrightError(
            "all operators that have scores are kept in float",
            where="keep_float",
            value=", ".join(keep_float),
            fix=f"remove a pattern that matches {_some(scored)}, or train without a plan",
            code="all-operators-kept-float",
        )
    else:
        raise BitwrightError(
            "no profile has a measurement of these operators in these formats",
            where="profiles",
            value=f"{', '.join(formats)}; scored: {_some(scored)}",
            fix=f"on each device: bitwright profile WORKLOAD --kernel {formats[0] if formats else 'int8'}",
            code="formats-not-profiled",
        )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
