"""Training that adapts to a cluster that changes.

Each rank measures its own share of every step. If a rank drifts from what the plan assumes, rank 0 plans again and all
ranks switch at the same step. The `Replanner` comes from a higher layer, because planning needs profiles.
"""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf, log
from typing import TYPE_CHECKING, Any

from bitwright.core.arguments import strict
from bitwright.core.errors import Problem, TrainError
from bitwright.core.formatting import counted
from bitwright.plan import Plan
from bitwright.training.config import TrainConfig
from bitwright.training.distributed import Ranks
from bitwright.training.step import PHASES, MeasuredStep
from bitwright.workload import Workload

if TYPE_CHECKING:
    from bitwright.training.run import TrainingRun

__all__ = ["Adaptation", "DriftSettings", "Planned", "Replanned", "Replanner"]

_MOST_ROWS = 512  # of the timeline; neighbours are merged beyond
_SHARE = 0.0025  # the largest share of the step time that comparisons of ranks may take


@strict
@dataclass(frozen=True, kw_only=True)
class DriftSettings:
    """When to plan again, and when to switch.

    >>> DriftSettings(threshold=0.3).interval
    5
    """

    interval: int = 5
    """Steps between two comparisons of the ranks. It grows if comparisons take more than 0.25 % of the time."""
    threshold: float = 0.15
    """Relative change of a rank's own time that counts as drift."""
    sustained: int = 2
    """Successive comparisons with the same drift, before rank 0 plans again."""
    min_gain: float = 0.05
    """Smallest predicted speedup for which ranks switch."""
    cooldown: int = 10
    """Steps after a switch in which no other one happens."""

    def __post_init__(self) -> None:
        """Reject values without meaning."""
        lowest: Mapping[str, float] = {"interval": 1, "threshold": 0.01, "sustained": 1, "min_gain": 0, "cooldown": 0}
        problems = [
            Problem(
                what=f"must be at least {least:g}",
                where=name,
                value=getattr(self, name),
                fix=f"for example {name}={DriftSettings.__dataclass_fields__[name].default:g}",
                code="invalid-setting",
            )
            for name, least in lowest.items()
            if not getattr(self, name) >= least
        ]
        if problems:
            raise TrainError(problems)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan with one section for each rank, and the predicted times of its step."""

    plan: Plan
    sections: tuple[str, ...]
    """The section of each rank."""
    batches: tuple[int, ...]
    seconds: float
    own: tuple[float, ...]
    """Predicted seconds that each rank computes in a step."""
    exposed: float
    """Predicted seconds that the last rank waits for messages."""
    penalty: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {"plan": self.plan.to_yaml()}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Planned:
        """The inverse of `to_dict`."""
        lists = {name: tuple(data[name]) for name in ("sections", "batches", "own")}
        return Planned(**{**data, **lists, "plan": Plan.from_yaml(data["plan"])})

    def describe(self) -> str:
        """Batches and the number of low-precision operators of each section."""
        return ", ".join(
            f"{name} {batch}" + (f" ({low} low)" if low else "")
            for name, batch, low in zip(self.sections, self.batches, self.low, strict=True)
        )

    @property
    def low(self) -> list[int]:
        """The number of low-precision operators of each rank."""
        computes = [self.plan.devices[name].compute.values() for name in self.sections]
        return [sum(spec.is_low_precision for spec in compute) for compute in computes]


@dataclass(frozen=True, kw_only=True)
class Replanned:
    """The current plan with the measured speeds, and the best plan for them."""

    current: Planned
    best: Planned


class Replanner(ABC):
    """Plans for the ranks that are present. Its methods are called on rank 0 only."""

    settings: DriftSettings = DriftSettings()

    @abstractmethod
    def begin(
        self,
        workload: Workload,
        config: TrainConfig,
        machines: Sequence[str | None],
        *,
        samples: int | None,
        plan: Plan | None,
        state: Mapping[str, Any] | None,
    ) -> Planned:
        """Plan at the start of a run.

        `machines` has the device kind of each rank. `samples` are those of a step; None: the usual batch of each rank.
        `plan` is used instead of a new one. `state` comes from a checkpoint.
        """

    @abstractmethod
    def replan(self, own: Sequence[float], exposed: float) -> Replanned:
        """Rescale the profiles so that they explain the measured times, and plan again."""

    @abstractmethod
    def adopt(self, planned: Planned) -> None:
        """The ranks have switched to this plan."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What a checkpoint needs, as JSON values."""


class DriftDetector:
    """Compares measured with expected times. All ranks get the same numbers, so they come to the same result.

    >>> detector = DriftDetector(DriftSettings(), [1.0, 1.0], 0.1)
    >>> detector.add([1.0, 1.05], 0.1, 1.2), detector.add([1.0, 2.0], 0.1, 2.2), detector.add([1.0, 2.0], 0.1, 2.2)
    ([], [], [1])
    """

    def __init__(self, settings: DriftSettings, own: Sequence[float], exposed: float) -> None:
        self.settings = settings
        self.own, self.exposed = list(own), exposed
        self._streaks: dict[int, int] = {}

    def add(self, own: Sequence[float], exposed: float, period: float) -> list[int]:
        """Return the ranks with sustained drift after one more comparison; -1 stands for the link."""
        signs = {r: self._sign(now, then) for r, (now, then) in enumerate(zip(own, self.own, strict=True))}
        change = exposed - self.exposed
        signs[-1] = 0 if abs(change) <= self.settings.threshold * period else 1 if change > 0 else -1
        for rank, sign in signs.items():
            before = self._streaks.get(rank, 0)
            self._streaks[rank] = sign * (abs(before) + 1) if before * sign > 0 else sign
        return [rank for rank, streak in self._streaks.items() if abs(streak) >= self.settings.sustained]

    def _sign(self, now: float, then: float) -> int:
        change = log(now / then) if now > 0 and then > 0 else inf
        return 0 if abs(change) <= log(1 + self.settings.threshold) else 1 if change > 0 else -1


# -- the adaptation of one run -----------------------------------------------------------------------------------


@dataclass
class Timeline:
    """What was measured, for the report: one row for each comparison, and the switches."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    switches: list[dict[str, Any]] = field(default_factory=list)

    def add(self, row: dict[str, Any]) -> None:
        """Add a row; merge neighbours if there are too many."""
        self.rows.append(row)
        if len(self.rows) > _MOST_ROWS:
            pairs = zip(self.rows[0::2], self.rows[1::2], strict=False)
            merged = [_merged(*pair) if len(pair[0]["own"]) == len(pair[1]["own"]) else pair[1] for pair in pairs]
            self.rows = [*merged, *self.rows[len(merged) * 2 :]]


def _merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    def mean(a: Any, b: Any) -> Any:
        return [mean(x, y) for x, y in zip(a, b, strict=True)] if isinstance(a, list) else (a + b) / 2

    return {key: value if key in ("step", "sections") else mean(first[key], value) for key, value in second.items()}


class Adaptation:
    """The current plan of a run, and the comparison of its ranks."""

    def __init__(self, replanner: Replanner, ranks: Ranks, planned: Planned, machines: Sequence[str | None]) -> None:
        self.replanner, self.ranks = replanner, ranks
        self.settings = replanner.settings
        self.planned, self.machines = planned, list(machines)
        self.interval = self.settings.interval
        self.timeline = Timeline()
        self.notes: list[str] = []
        """What the start decided."""
        self._detector = DriftDetector(self.settings, planned.own, planned.exposed)
        self._switched: int | None = None
        self._cost = 0.0
        self._costs: list[float] = []

    @staticmethod
    def begin(
        replanner: Replanner,
        workload: Workload,
        config: TrainConfig,
        ranks: Ranks,
        kind: str | None,
        plan: Plan | None,
        saved: tuple[int, int, Mapping[str, Any] | None] | None,
    ) -> Adaptation:
        """Plan for the ranks that are present; all ranks call this.

        `saved` has the step of the checkpoint to resume, its samples per step, and its state of the adaptation.
        """
        names = [None] if kind is None else [name.strip() for name in kind.split(",")]
        machines = ranks.gather(names[ranks.rank] if len(names) == ranks.world else names[0])
        step, samples, state = saved if saved is not None else (0, None, None)
        same = state is not None and state["machines"] == machines
        if state is not None and same:
            plan = Plan.from_yaml(state["planned"]["plan"])
        elif state is not None:
            plan = None  # made for other ranks

        def start() -> dict[str, Any]:
            if len(names) not in (1, ranks.world):
                what, fix = f"{len(names)} kinds, but {counted(ranks.world, 'process')}", "name one kind for each rank"
                raise TrainError.single(what, where="kind", value=kind, fix=fix, code="device-kind-count")
            inner = None if state is None else state["replanner"]
            return replanner.begin(workload, config, machines, samples=samples, plan=plan, state=inner).to_dict()

        own = Adaptation(replanner, ranks, Planned.from_dict(ranks.from_first(start)), machines)
        reason = f"the plan for {counted(len(machines), 'rank')}"
        if state is not None:
            own.timeline = Timeline(list(state["rows"]), list(state["switches"]))
            if not same:
                reason = f"{counted(len(machines), 'rank')} instead of {len(state['machines'])}"
                own.timeline.switches.append(_switch_row(step, reason, None, own.planned))
        words = f"{own.planned.describe()}: {1e3 * own.planned.seconds:.3g} ms predicted"
        own.notes = [f"step {step}: {reason}: {words}"]
        return own

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs; only rank 0 has the state of the replanner."""
        return {
            "machines": self.machines,
            "planned": self.planned.to_dict(),
            "replanner": self.replanner.state() if self.ranks.first else {},
            "rows": self.timeline.rows,
            "switches": self.timeline.switches,
        }

    def facts(self) -> dict[str, Any]:
        """The timeline for the result."""
        return {
            "machines": self.machines,
            "sections": list(self.planned.sections),
            "settings": asdict(self.settings),
            "phases": list(PHASES),
            "rows": self.timeline.rows,
            "switches": self.timeline.switches,
        }

    def after_step(self, run: TrainingRun) -> bool:
        """Compare the ranks every few steps. Returns whether they have switched to another plan."""
        step = run.training_step
        if run.step % self.interval or not isinstance(step, MeasuredStep):
            return False
        taken = self._compare(step)
        if not taken:
            return False
        own, exposed = [row[0] for row in taken], min(row[1] for row in taken)
        period = max(row[2] for row in taken)
        self.timeline.add(
            {
                "step": run.step,
                "seconds": period,
                "predicted": self.planned.seconds,
                "own": own,
                "exposed": exposed,
                "phases": [row[3:] for row in taken],
                "sections": list(self.planned.sections),
            }
        )
        drifted = self._detector.add(own, exposed, period)
        cooling = self._switched is not None and run.step - self._switched < self.settings.cooldown
        if not drifted or cooling or run.steps - run.step < self.settings.cooldown:
            return False
        return self._replan(run, drifted, own, exposed, period)

    def _compare(self, step: MeasuredStep) -> list[list[float]]:
        """The medians of all ranks; nothing if a rank has none. The interval grows if comparisons take too long."""
        begun = time.perf_counter()
        mine = [statistics.median(column) for column in zip(*step.rows, strict=True)] if step.rows else []
        step.rows = []
        rows = self.ranks.share([self._cost, *(mine or [0.0] * (3 + len(PHASES)))])
        self._cost = time.perf_counter() - begun
        period = max(row[3] for row in rows)
        if not all(row[3] > 0 for row in rows):
            return []
        self._costs = [*self._costs[-4:], min(row[0] for row in rows)]  # the last rank to arrive doesn't wait
        # the smallest one: others contain pauses of a CPU quota, which steps have as well
        if len(self._costs) > 4 and min(self._costs) > _SHARE * self.interval * period:
            self.interval, self._costs = min(2 * self.interval, 20 * self.settings.interval), []
        return [row[1:] for row in rows]

    def _replan(self, run: TrainingRun, drifted: list[int], own: list[float], exposed: float, period: float) -> bool:
        begun = time.perf_counter()
        left = run.steps - run.step

        def plan() -> dict[str, Any]:
            found = self.replanner.replan(own, exposed)
            return {"current": found.current.to_dict(), "best": found.best.to_dict()}

        found = {name: Planned.from_dict(one) for name, one in self.ranks.from_first(plan).items()}
        current, best = found["current"], found["best"]
        reason = self._reason(drifted, own, exposed)
        taken = time.perf_counter() - begun
        gain = current.seconds / best.seconds - 1
        milder = best.penalty < 0.9 * current.penalty and gain >= -0.01
        pays = gain * best.seconds * left > period  # switching takes about a step
        if not ((gain >= self.settings.min_gain and pays) or milder):
            run.note(f"step {run.step}: {reason}; the plan stays, because the best one would gain {100 * gain:.1f} %")
            self.planned = current
        else:
            run.note(
                f"step {run.step}: {reason}; switched to {best.describe()}: {1e3 * best.seconds:.3g} ms predicted, "
                f"{1e3 * current.seconds:.3g} ms with the plan before, planned in {taken:.2f} s"
            )
            self.timeline.switches.append(_switch_row(run.step, reason, current, best))
            if self.ranks.first:
                self.replanner.adopt(best)
            self.planned, self._switched = best, run.step
            run.switch(best)
        step = run.training_step
        if isinstance(step, MeasuredStep):
            step.settle()
        self._detector = DriftDetector(self.settings, self.planned.own, self.planned.exposed)
        return self.planned is best

    def _reason(self, drifted: list[int], own: list[float], exposed: float) -> str:
        words = [
            f"rank {rank} ({self.planned.sections[rank]}) takes {own[rank] / self.planned.own[rank]:.2f} times as long "
            "as planned"
            for rank in drifted
            if rank >= 0
        ]
        if -1 in drifted:
            words.append(f"messages take {1e3 * exposed:.3g} ms instead of {1e3 * self.planned.exposed:.3g} ms")
        return " and ".join(words)


def _switch_row(step: int, reason: str, before: Planned | None, after: Planned) -> dict[str, Any]:
    return {
        "step": step,
        "reason": reason,
        "predicted_before": None if before is None else before.seconds,
        "predicted": after.seconds,
        "sections": list(after.sections),
        "batches": list(after.batches),
        "low": after.low,
    }


def adaptive_problems(config: TrainConfig, *, quantizes: bool) -> Iterable[Problem]:
    """Settings that adaptive training doesn't support."""
    refused = {
        "precision": (quantizes, "quantizers must be equal on all ranks", "pass compute= or omit precision"),
        "parallel": (config.parallel != "ddp", "shards can't be divided again within a run", "use parallel='ddp'"),
        "recipe": (config.recipe is not None, "the number of iterations depends on the batch", "omit the recipe"),
        "compile": (config.compile, "a compiled model can't change its kernels", "omit compile"),
    }
    for where, (given, what, fix) in refused.items():
        if given:
            yield Problem(what=f"adaptive training: {what}", where=where, fix=fix, code="adaptive-unsupported")


def samples_per_step(identity: Mapping[str, Any]) -> int:
    """The samples of a step of a saved run, without accumulation."""
    if "samples per step" in identity:
        return int(identity["samples per step"])
    parts = identity["batch per process"]
    return int(parts * identity["processes"]) if isinstance(parts, int) else sum(parts)
