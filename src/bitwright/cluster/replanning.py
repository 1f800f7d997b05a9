"""`ClusterReplanner`: plan again during a run, with profiles that are rescaled by measured step times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from logging import getLogger
from math import log2
from pathlib import Path
from statistics import median
from typing import Any

from bitwright.cluster.cluster import Cluster
from bitwright.cluster.cluster_cost_model import ClusterCostModel
from bitwright.cluster.cluster_plan import Penalties
from bitwright.cluster.cost_lookup import check_layout, explain_batch_mismatch
from bitwright.cluster.cost_model import FLOAT
from bitwright.cluster.planners import Allocation, allocation, dynamic_batching, recover_and_split
from bitwright.cluster.predictor import uses_channels_last
from bitwright.core.arguments import strict
from bitwright.core.errors import PlanError, Problem, TrainError, did_you_mean
from bitwright.core.tensor_tree import batch_size
from bitwright.graph import capture
from bitwright.plan import Device, Plan
from bitwright.profiling.device_profile import DeviceProfile, step_uncertainty
from bitwright.profiling.profiled_step import WorkloadStep
from bitwright.sensitivity import OperatorScores, spec_of
from bitwright.training.adaptive import DriftSettings, Planned, Replanned, Replanner
from bitwright.training.config import StepSettings, TrainConfig
from bitwright.workload import Workload

__all__ = ["ClusterReplanner"]

log = getLogger("bitwright")
_LINK = (1 / 64, 4096.0)  # how much faster or slower than its profile a link can be
_HALVINGS = 30
_LEAST = 1e-9  # seconds
_DOUBTFUL = 0.5  # relative uncertainty of a profile that says nothing about batches and formats


@strict
class ClusterReplanner(Replanner):
    """Plans precision and batches for the ranks that are present, from the profiles of a cluster.

    `cluster` names the kinds of devices and their profiles; the ranks that are present count, not the numbers in it.
    Without `scores`, operators stay in float and only batches are planned. `settings` says when ranks switch.

    >>> from bitwright import Cluster, ClusterReplanner
    >>> ClusterReplanner(Cluster.of({"fast": 1, "slow": 1}))
    ClusterReplanner(fast, slow)
    """

    def __init__(
        self,
        cluster: Cluster | str | Path,
        scores: Penalties | str | Path | None = None,
        *,
        profiles: Mapping[str, DeviceProfile] | None = None,
        keep_float: Sequence[str] = (),
        settings: DriftSettings | None = None,
    ) -> None:
        self.cluster = cluster if isinstance(cluster, Cluster) else Cluster.load(cluster)
        loaded = OperatorScores.load(Path(scores)) if isinstance(scores, str | Path) else scores
        self.penalties = loaded.values if isinstance(loaded, OperatorScores) else loaded or {}
        self.profiles = profiles
        self.keep_float = tuple(keep_float)
        self.settings = settings or DriftSettings()
        self.sections: tuple[str, ...] = ()
        self.slowdowns: dict[str, float] = {}
        self.link = 1.0
        self._machines: list[str] = []
        self._channels_last = False
        self._measures_first = False
        self._model: ClusterCostModel | None = None
        self._current: Allocation | None = None
        self._other: Allocation | None = None

    def __repr__(self) -> str:
        return f"ClusterReplanner({', '.join(self.cluster.devices)})"

    # -- start -------------------------------------------------------------------------------------------------

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
        """Plan for these ranks; the slowdowns of machines that were measured before are kept."""
        self._machines = self._kinds(machines)
        self.sections = section_names(self._machines)
        self.slowdowns, self.link = self._known(state)
        self._channels_last = config.channels_last or (plan is not None and uses_channels_last(plan))
        resolved = None
        if plan is not None:
            resolved = replace(plan, backend=None).resolve(capture(workload.model, workload.inputs))
        self._model = self._cost_model(workload, config, samples)
        self._rescale()
        if resolved is not None:
            self._current = self._allocation_of(resolved)
        else:
            self._current = self._equal() if self._measures_first and state is None else self._best()
        return self._planned(self._current)

    def _kinds(self, machines: Sequence[str | None]) -> list[str]:
        known = list(self.cluster.devices)
        problems = {
            kind: Problem(
                what="name the kind of this device" if kind is None else "the cluster has no such kind of device",
                where="kind",
                value=kind,
                fix=f"--device-kind {known[0]}, or one kind for each rank: {','.join(known)}"
                if kind is None
                else did_you_mean(kind, known),
                code="device-kind-required" if kind is None else "unknown-device-kind",
            )
            for kind in machines
            if (kind is None and len(known) > 1) or (kind is not None and kind not in known)
        }
        if problems:
            raise TrainError(list(problems.values()))
        return [kind or known[0] for kind in machines]

    def _known(self, state: Mapping[str, Any] | None) -> tuple[dict[str, float], float]:
        """The slowdowns of a checkpoint: by rank if the ranks are the same, else in the order of each kind."""
        if state is None:
            return dict.fromkeys(self.sections, 1.0), 1.0
        left: dict[str, list[float]] = {}
        for kind, slowdown in zip(state["machines"], state["slowdowns"], strict=True):
            left.setdefault(kind, []).append(slowdown)
        usual = {kind: median(values) for kind, values in left.items()}
        found = {
            section: left[kind].pop(0) if left.get(kind) else usual.get(kind, 1.0)
            for section, kind in zip(self.sections, self._machines, strict=True)
        }
        return found, float(state["link"]) if len(state["machines"]) == len(self._machines) else 1.0

    def _cost_model(self, workload: Workload, config: TrainConfig, samples: int | None) -> ClusterCostModel:
        wanted = set(self._machines)
        if self.profiles is not None:
            known = {kind: profile for kind, profile in self.profiles.items() if kind in wanted}
        else:
            present = {kind: device for kind, device in self.cluster.devices.items() if kind in wanted}
            known = self.cluster.only(present).profiles()
        missing = [kind for kind in wanted if kind not in known]
        if missing:
            what, fix = "this kind of device has no profile", "pass its profile in profiles="
            raise PlanError([Problem(what=what, where=missing[0], fix=fix, code="profile-required")])
        check_layout(known, channels_last=config.channels_last)
        devices = {
            section: self.cluster.devices[kind].model_copy(update={"count": 1})
            for section, kind in zip(self.sections, self._machines, strict=True)
        }
        world = len(self._machines)
        known = {kind: with_collectives(profile, world) for kind, profile in known.items()}
        profiles = {section: known[kind] for section, kind in zip(self.sections, self._machines, strict=True)}
        step = WorkloadStep.of(workload, config.batch, channels_last=config.channels_last)
        graph = step.record()
        doubtful = [kind for kind, profile in known.items() if step_uncertainty(profile, graph) > _DOUBTFUL]
        self._measures_first = bool(doubtful)
        if doubtful:
            words = "operators stay float, and batches are equal until steps are measured; profile on an idle machine"
            log.warning("the times of %s are uncertain by more than 50 %%: %s", ", ".join(doubtful), words)
        formats = sorted({format for own in self.penalties.values() for format in own if format != FLOAT})
        with explain_batch_mismatch(known, batch_size(step.batch)):
            return ClusterCostModel(
                graph,
                profiles,
                self.cluster.only(devices),
                self.penalties,
                {} if doubtful else {format: spec_of(format) for format in formats},
                settings=step_settings(config),
                keep_float=self.keep_float,
                smaller=None if doubtful else step.record_half(),
                samples=samples,
            )

    # -- plans -------------------------------------------------------------------------------------------------

    @property
    def model(self) -> ClusterCostModel:
        """The cost model of the ranks that are present."""
        assert self._model is not None, "begin comes first"
        return self._model

    def _best(self) -> Allocation:
        return recover_and_split(self.model) if self.model.operators else dynamic_batching(self.model)

    def _equal(self) -> Allocation:
        """Everything in float, with batches that differ by one sample at most."""
        each, more = divmod(self.model.samples, len(self.sections))
        batches = {section: each + (number < more) for number, section in enumerate(self.sections)}
        return allocation(
            self.model, {section: dict.fromkeys(self.model.operators, FLOAT) for section in batches}, batches
        )

    def _allocation_of(self, plan: Plan) -> Allocation:
        """The formats and batches of a given plan, whose sections are those of ranks or of kinds."""
        model = self.model
        formats = {replace(spec, why=""): format for format, spec in model.computes.items()}
        plans: dict[str, dict[str, str]] = {}
        for section, kind in zip(self.sections, self._machines, strict=True):
            name = section if section in plan.devices else kind
            own = plan.for_device(name) if name in plan.devices else plan
            low = {op: replace(spec, why="") for op, spec in own.compute.items() if spec.is_low_precision}
            unknown = [op for op, spec in low.items() if op not in model.operators or spec not in formats]
            if unknown:
                what, fix = "the scores don't contain this operator in this format", "score it, or omit the plan"
                value = own.compute[unknown[0]].format
                raise PlanError([Problem(what=what, where=unknown[0], value=value, fix=fix, code="formats-not-scored")])
            plans[section] = {op: formats[low[op]] if op in low else FLOAT for op in model.operators}
        return allocation(model, plans, self._batches_of(plan))

    def _batches_of(self, plan: Plan) -> dict[str, int]:
        """The batch of each section; ranks without one get the usual batch."""
        found = {}
        for section, kind in zip(self.sections, self._machines, strict=True):
            device = plan.devices.get(section, plan.devices.get(kind))
            found[section] = self.model.batch if device is None or device.batch is None else device.batch
        if sum(found.values()) != self.model.samples:
            self.model.total = sum(found.values())
        return found

    def _planned(self, chosen: Allocation) -> Planned:
        plan = self.model.to_plan(chosen)
        devices: dict[str, Device] = {
            name: replace(device, channels_last=self._channels_last) for name, device in plan.devices.items()
        }
        own, exposed, seconds = self.model.step_shares(chosen.plans, chosen.batches)
        return Planned(
            plan=replace(plan, devices=devices),
            sections=self.sections,
            batches=tuple(chosen.batches[section] for section in self.sections),
            seconds=seconds,
            own=tuple(own[section] for section in self.sections),
            exposed=exposed,
            penalty=chosen.penalty,
        )

    # -- during the run ----------------------------------------------------------------------------------------

    def _rescale(self) -> None:
        self.model.rescale(self.slowdowns, self.link)

    def replan(self, own: Sequence[float], exposed: float) -> Replanned:
        """Rescale the profile of each rank and the collectives, and plan again."""
        assert self._current is not None, "begin comes first"
        now = self._current
        for _ in range(2):  # the link changes how much messages slow computation down
            predicted, _, _ = self.model.step_shares(now.plans, now.batches)
            for section, seconds in zip(self.sections, own, strict=True):
                self.slowdowns[section] *= seconds / max(predicted[section], _LEAST)
            self._rescale()
            self._fit_link(exposed)
        current = allocation(self.model, now.plans, now.batches)
        try:
            best = self._best()
        except PlanError as error:  # keep training with the current plan
            log.warning("no other plan: %s", error.problems[0])
            best = current
        self._current, self._other = current, best
        return Replanned(current=self._planned(current), best=self._planned(best))

    def _fit_link(self, exposed: float) -> None:
        """Find the factor of the collectives that explains how long the last rank waits for messages."""
        assert self._current is not None
        now = self._current
        if len(self.sections) < 2:
            return

        def predicted(link: float) -> float:
            self.model.rescale(self.slowdowns, link)
            return self.model.step_shares(now.plans, now.batches)[1]

        low, high = _LINK
        for _ in range(_HALVINGS):
            middle = float((low * high) ** 0.5)
            low, high = (middle, high) if predicted(middle) < exposed else (low, middle)
        self.link = float((low * high) ** 0.5)
        self._rescale()

    def adopt(self, planned: Planned) -> None:
        """Predictions now refer to the new plan."""
        self._current = self._other

    def state(self) -> dict[str, Any]:
        """The slowdowns, for the next start."""
        slowdowns = [self.slowdowns[section] for section in self.sections]
        return {"machines": list(self._machines), "slowdowns": slowdowns, "link": self.link}


def section_names(machines: Sequence[str]) -> tuple[str, ...]:
    """A name for each rank: its kind, numbered if there are several of the kind.

    >>> section_names(["fast", "slow", "slow"])
    ('fast', 'slow-0', 'slow-1')
    """
    counts, numbers, taken = Counter(machines), Counter[str](), set(machines)
    found = []
    for kind in machines:
        name = kind
        if counts[kind] > 1:
            while (name := f"{kind}-{numbers[kind]}") in taken:
                numbers[kind] += 1
            numbers[kind] += 1
        found.append(name)
        taken.add(name)
    return tuple(found)


def with_collectives(profile: DeviceProfile, world: int) -> DeviceProfile:
    """The profile with collectives among `world` ranks, derived from those of another number of ranks if necessary.

    Gloo's all-reduce is a ring: each rank sends 2(n−1)/n of the bytes in 2(n−1) messages. A broadcast is a tree.
    """
    found = list(profile.collectives)
    for kind in dict.fromkeys((cost.operation, cost.backend) for cost in found):
        own = [cost for cost in found if (cost.operation, cost.backend) == kind]
        if world < 2 or any(cost.world == world for cost in own):
            continue
        near = min(own, key=lambda cost: abs(cost.world - world))
        before, now = near.world, world
        if kind[0] == "all_reduce":
            rounds, share = (now - 1) / (before - 1), (1 - 1 / now) / (1 - 1 / before)
        else:
            rounds = share = log2(now) / log2(before)
        scaled = {"world": world, "latency": rounds * near.latency, "per_byte": share * near.per_byte}
        found.append(near.model_copy(update=scaled))
    return profile.model_copy(update={"collectives": found})


def step_settings(config: TrainConfig) -> StepSettings:
    """The step of a training run, for predictions."""
    return StepSettings(
        optimizer=config.optimizer,
        momentum=config.momentum,
        clip=config.clip,
        accumulate=config.accumulate,
        amp=config.amp,
        fuse=config.fuse,
    )
