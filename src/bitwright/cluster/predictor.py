"""`bitwright.predict`: predict the time and the memory of a training step, from a recorded step and device profiles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from bitwright.cluster.cluster import Cluster
from bitwright.cluster.cost_lookup import check_layout, explain_batch_mismatch
from bitwright.cluster.data_parallel import Bucket, Lane, StepReplay, make_buckets, on_line, replay
from bitwright.cluster.device_step import DeviceStep
from bitwright.cluster.memory import memory_of
from bitwright.cluster.prediction import DevicePrediction, Prediction, critical_path
from bitwright.core.arguments import strict
from bitwright.core.errors import BitwrightError, PlanError, Problem, did_you_mean, log_warnings
from bitwright.plan import Plan
from bitwright.profiling.device_profile import DeviceProfile, uncertain_times
from bitwright.profiling.profiled_step import WorkloadStep, resolve_plan
from bitwright.profiling.step_graph import StepGraph
from bitwright.training.config import StepSettings
from bitwright.workload import Workload

_AFTER = ("clip", "optimizer")  # phases after the collectives, which don't take longer with a larger batch


@dataclass(frozen=True)
class Modelled:
    """Effects of the simulation, which can be switched off to measure their influence."""

    casts: bool = True
    overlap: bool = True
    contention: bool = True


@strict
def predict(
    workload: Workload,
    target: DeviceProfile | Cluster,
    plan: Plan | str | Path | None = None,
    *,
    profiles: Mapping[str, DeviceProfile] | None = None,
    batch: int | None = None,
    channels_last: bool = False,
    settings: StepSettings | None = None,
    graph: StepGraph | None = None,
    exact: bool = False,
) -> Prediction:
    """Predict the time and the memory of one training step, without running it.

    `target` is the profile of one device, or a cluster. `profiles` gives the profiles of the cluster's device kinds;
    without it they are loaded from the files that the cluster names. `plan` is a precision name such as `int8`, a plan
    file or a `Plan`; without it the model trains in float. `graph` is a recorded step, which replaces recording one.
    `exact` simulates each device by itself; otherwise devices of one kind are simulated together.

    >>> from bitwright import load_workload, predict, profile
    >>> workload = load_workload("digits-untrained")
    >>> device = profile(workload, published="nvidia-t4", batch=8)
    >>> prediction = predict(workload, device, batch=8)
    >>> prediction.samples
    8
    """
    settings = settings or StepSettings()
    resolved = Plan() if plan is None else resolve_plan(workload, plan)
    channels_last = uses_channels_last(resolved, channels_last=channels_last)
    if isinstance(target, Cluster):
        known = dict(profiles) if profiles is not None else target.profiles()
    else:
        known = {"device": target}
    half = None
    if graph is None:
        check_layout(known, channels_last=channels_last)
        step = WorkloadStep.of(workload, batch, channels_last=channels_last)
        graph = step.record()
        if any(device.batch is not None for device in resolved.devices.values()):
            half = step.record_half()
    with explain_batch_mismatch(known, graph.samples):
        if isinstance(target, Cluster):
            predictor = _predictor(workload, graph, half, resolved, known, target, settings)
        else:
            predictor = Predictor.make(graph, resolved, known, None, settings)
        prediction = predictor.predict(exact=exact)
    log_warnings(prediction.warnings)
    return prediction


def read_target(
    *, profile: Path | None = None, cluster: Path | None = None, graph: Path | None = None
) -> tuple[DeviceProfile | Cluster, dict[str, DeviceProfile], StepGraph | None]:
    """Read a profile or a cluster with its profiles, and a recorded step. All problems are reported together."""
    problems: list[Problem] = []
    profiles: dict[str, DeviceProfile] = {}
    target: DeviceProfile | Cluster | None = None
    recorded = None
    if profile is not None:
        with _collecting(problems, profile):
            target = DeviceProfile.load(profile)
            profiles = {"device": target}
    if cluster is not None:
        with _collecting(problems, cluster):
            target = Cluster.load(cluster)
            problems += target.missing_plans()
            profiles = target.profiles()
    if graph is not None:
        with _collecting(problems, graph):
            recorded = StepGraph.load(graph)
    if problems or target is None:
        raise PlanError(problems, title="can't use the given files")
    return target, profiles, recorded


@contextmanager
def _collecting(problems: list[Problem], file: Path) -> Iterator[None]:
    try:
        yield
    except BitwrightError as error:
        for problem in error.problems:
            where = problem.where or ""
            problems.append(problem if file.name in where else replace(problem, where=f"{file}: {where}"))


def _predictor(
    workload: Workload,
    graph: StepGraph,
    half: StepGraph | None,
    plan: Plan,
    profiles: Mapping[str, DeviceProfile],
    cluster: Cluster,
    settings: StepSettings,
) -> Predictor:
    plans = {
        name: resolve_plan(workload, cluster.folder / kind.plan)
        if kind.plan is not None
        else (plan.for_device(name) if name in plan.devices else plan)
        for name, kind in cluster.devices.items()
    }
    batches = {name: device.batch for name, device in plan.devices.items() if device.batch is not None}
    return Predictor.make(graph, plans, profiles, cluster, settings, batches=batches, smaller=half)


def uses_channels_last(plan: Plan, *, channels_last: bool = False) -> bool:
    """Return whether images are NHWC, because the caller or a device of the plan requests it."""
    return channels_last or any(device.channels_last for device in plan.devices.values())


@strict
def predict_step(
    graph: StepGraph,
    plan: Plan | Mapping[str, Plan],
    profiles: DeviceProfile | Mapping[str, DeviceProfile],
    cluster: Cluster | None = None,
    settings: StepSettings | None = None,
    *,
    exact: bool = False,
    modelled: Modelled | None = None,
) -> Prediction:
    """Predict a recorded step. For several kinds of devices, pass profiles (and optionally plans) by name.

    Equal devices are simulated together; `exact` simulates each one.
    """
    return Predictor.make(graph, plan, profiles, cluster, settings, modelled=modelled).predict(exact=exact)


@strict
@dataclass(frozen=True)
class Predictor:
    """Predicts steps of a cluster with a plan for each kind. `changed` updates the plan of one kind cheaply."""

    graph: StepGraph
    settings: StepSettings
    cluster: Cluster
    profiles: Mapping[str, DeviceProfile]
    locals: Mapping[str, DeviceStep]
    modelled: Modelled
    batches: Mapping[str, int] = field(default_factory=dict)
    """Batch sizes of kinds that differ from the recorded step."""
    smaller: Mapping[str, DeviceStep] = field(default_factory=dict)
    """The step with a smaller batch, if it was measured. Other batch sizes are interpolated linearly."""

    @staticmethod
    def make(
        graph: StepGraph,
        plan: Plan | Mapping[str, Plan],
        profiles: DeviceProfile | Mapping[str, DeviceProfile],
        cluster: Cluster | None = None,
        settings: StepSettings | None = None,
        *,
        modelled: Modelled | None = None,
        batches: Mapping[str, int] | None = None,
        smaller: StepGraph | None = None,
    ) -> Predictor:
        """Look up all costs. Without `batches`, the batch sizes of the plan are used.

        `smaller` is the step recorded with a smaller batch. For kinds whose profile has it, other batch sizes are
        interpolated instead of proportional, because small batches cost more per sample.
        """
        settings, modelled = settings or StepSettings(), modelled or Modelled()
        if isinstance(profiles, DeviceProfile):
            only = next(iter(cluster.devices)) if cluster is not None else "device"
            profiles = {only: profiles}
        if cluster is None:
            cluster = Cluster.of(dict.fromkeys(profiles, 1))
        for name in cluster.devices:
            if name not in profiles:
                raise BitwrightError(
                    "this kind of device has no profile",
                    where=name,
                    fix=did_you_mean(name, profiles),
                    code="profile-required",
                )
        locals_ = {
            name: DeviceStep.build(graph, plan_for(plan, name), profiles[name], settings, casts=modelled.casts)
            for name in cluster.devices
        }
        if batches is None and isinstance(plan, Plan):
            batches = {name: device.batch for name, device in plan.devices.items() if device.batch is not None}
        small: dict[str, DeviceStep] = {}
        if smaller is not None:
            for name in cluster.devices:
                own = plan_for(plan, name)
                with suppress(BitwrightError):  # not measured
                    small[name] = DeviceStep.build(smaller, own, profiles[name], settings, casts=modelled.casts)
        return Predictor(graph, settings, cluster, profiles, locals_, modelled, batches or {}, small)

    def changed(self, kind: str, plan: Plan, operators: set[str]) -> Predictor:
        """Return a predictor with another plan for one kind, which differs only at these operators."""
        if kind not in self.locals:
            raise BitwrightError(
                "no such kind of device", value=kind, fix=did_you_mean(kind, self.locals), code="unknown-device-kind"
            )
        small = {name: local for name, local in self.smaller.items() if name != kind}
        if kind in self.smaller:
            with suppress(BitwrightError):  # not measured
                small[kind] = self.smaller[kind].replaced(plan, operators)
        return replace(self, locals={**self.locals, kind: self.locals[kind].replaced(plan, operators)}, smaller=small)

    # -- simulation -----------------------------------------------------------------------------------------

    @cached_property
    def buckets(self) -> list[Bucket]:
        """The gradient buckets of rank 0, which DDP uses on all ranks."""
        first = next(iter(self.locals.values()))
        return make_buckets(first.trained, self.settings.bucket_cap_mb) if self.cluster.world > 1 else []

    def lane(self, name: str) -> Lane:
        """The work of one kind."""
        return self.lane_of(name, self.locals[name], self.smaller.get(name), self.share(name))

    def lane_of(self, name: str, local: DeviceStep, small: DeviceStep | None, share: float) -> Lane:
        """The work of a kind with another plan and batch; `small` is that plan's step with the smaller batch."""
        lane = self._recorded(name, local)
        if share == 1:
            return lane
        if small is not None and small.graph.samples < self.graph.samples:
            return lane.of_batch(share, small.graph.samples / self.graph.samples, self._recorded(name, small))
        still = sum(local.still.values())
        nothing = replace(lane, ready=(still,) * len(lane.ready), begun=still, turned=still, computing=still)
        return lane.of_batch(share, 0.0, nothing)

    def _phases(self, name: str) -> dict[str, float]:
        """The phases of a kind's step with its batch size."""
        local, small, share = self.locals[name], self.smaller.get(name), self.share(name)
        whole = local.phases
        if share == 1:
            return whole
        at, other = 0.0, {phase: local.still.get(phase, 0.0) for phase in whole}
        if small is not None and small.graph.samples < self.graph.samples:
            at, other = small.graph.samples / self.graph.samples, small.phases
        return {n: s if n in _AFTER else on_line(share, at, other[n], s) for n, s in whole.items()}

    def _recorded(self, name: str, local: DeviceStep) -> Lane:
        """The work of a step with the recorded batch size."""
        host = self.profiles[name].host
        several = self.cluster.world > 1
        count = self.settings.accumulate
        per_gradient = host.ddp_gradient if several else 0.0
        forward = local.forward_seconds + local.loss.forward + (host.ddp_forward if several else 0.0)
        begun = local.tail["other"] + local.host_limit + local.tail["accumulate"]
        begun += (count - 1) * (forward + local.backward_seconds)
        before = begun + forward
        ready = local.gradient_offsets
        end = before + local.backward_seconds + len(ready) * per_gradient
        return Lane(
            name,
            tuple(_ready(bucket, ready, before, per_gradient, end) for bucket in self.buckets),
            end,
            local.tail["clip"] + local.tail["optimizer"],
            host.contention if several and self.modelled.contention else 0.0,
            self.cluster.devices[name].count,
            host.stretch if several and self.modelled.contention else 1.0,
            name,
            begun,
            before,
        )

    def share(self, kind: str) -> float:
        """The batch size of a kind relative to the recorded one."""
        return self.batches.get(kind, self.graph.samples) / self.graph.samples

    @cached_property
    def collectives(self) -> list[float]:
        """Seconds of the all-reduce of each bucket."""
        cost = self.cluster.collective("all_reduce", dict(self.profiles), self.cluster.world)
        return [cost.latency + bucket.bytes * cost.per_byte for bucket in self.buckets]

    @cached_property
    def first(self) -> float:
        """Seconds of the broadcast of rank 0's buffers, once per step; DDP skips it for accumulated batches."""
        if self.cluster.world < 2 or not self.graph.buffer_bytes:
            return 0.0
        cost = self.cluster.collective("broadcast", dict(self.profiles), self.cluster.world)
        return cost.latency + self.graph.buffer_bytes * cost.per_byte

    def replay(self, *, exact: bool = False) -> StepReplay:
        """Replay the step on all devices."""
        lanes = [self.lane(name) for name in self.cluster.devices]
        if exact:
            lanes = [replace(lane, name=f"{lane.name}-{i}", count=1) for lane in lanes for i in range(lane.count)]
        return replay(lanes, self.collectives, self.first, overlap=self.modelled.overlap)

    @property
    def seconds(self) -> float:
        """The step time, without the rest of a prediction."""
        return self.replay().period

    def predict(self, *, exact: bool = False) -> Prediction:
        """Predict times, waiting times and memory."""
        step = self.replay(exact=exact)
        sending = sum(sent.end - sent.start for sent in step.sent) + self.first
        memory = {
            name: memory_of(local, distributed=self.cluster.world > 1).of_batch(self.share(name))
            for name, local in self.locals.items()
        }
        devices = []
        for run in step.lanes:
            kind, lane = run.lane.kind, run.lane
            spent = run.computed - run.knots[0][0] + lane.tail  # including the slowdown by messages, but not waiting
            busy = min(1.0, spent / step.period) if step.period else 0.0
            devices.append(
                DevicePrediction(
                    name=lane.name,
                    count=lane.count,
                    computing=lane.computing + lane.tail,
                    busy=busy,
                    communicating=min(1.0, sending / step.period) if step.period else 0.0,
                    waiting=max(0.0, 1.0 - busy),
                    phases=self._phases(kind),
                    memory=memory[kind],
                    limit=self.cluster.memory_limit(kind, self.profiles[kind]),
                    stood_in=self.locals[kind].stood_in,
                )
            )
        samples = sum(self.batches.get(n, self.graph.samples) * kind.count for n, kind in self.cluster.devices.items())
        return Prediction(
            model=self.graph.model,
            seconds=step.period,
            devices=tuple(devices),
            buckets=tuple(bucket.bytes for bucket in self.buckets),
            critical=critical_path(step),
            samples=self.settings.accumulate * samples,
            replay=step,
            locals=dict(self.locals),
            warnings=tuple(
                problem
                for kind, local in self.locals.items()
                for problem in uncertain_times(local.profile, self.graph, where=kind)
            ),
        )


def _ready(
    bucket: Bucket, offsets: Mapping[str, tuple[float, int]], before: float, per_gradient: float, end: float
) -> float:
    """The time of the last gradient of a bucket; the end of backward if this device doesn't have it."""
    last = offsets.get(bucket.names[-1])  # names are in the order of the gradients
    if last is None:
        return end
    return before + last[0] + last[1] * per_gradient


def plan_for(plan: Plan | Mapping[str, Plan], kind: str) -> Plan:
    """The plan of one kind: its own, or its part of the common plan."""
    if not isinstance(plan, Plan):
        if kind not in plan:
            raise BitwrightError(
                "this kind of device has no plan", where=kind, fix=did_you_mean(kind, plan), code="plan-required"
            )
        return plan[kind]
    return plan.for_device(kind) if kind in plan.devices else replace(plan, devices={})
