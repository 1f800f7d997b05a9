"""A model on a cluster that was profiled: what planners ask is answered by replaying the step."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from bitwright.errors import PlanError, Problem, did_you_mean
from bitwright.plan import ComputeSpec, Device, Plan
from bitwright.planners.allocate import Allocation
from bitwright.planners.machine import FLOAT, Assignment, Plans
from bitwright.predict import Cluster, Local, Predictor
from bitwright.predict.costs import told
from bitwright.predict.memory import MemoryUse, memory_of
from bitwright.predict.replay import Lane, replay
from bitwright.profile import DeviceProfile, OperatorUnderPlan, StepGraph, StepSettings
from bitwright.profile.watch import operator_key
from bitwright.profile.way import IMPLEMENTATIONS


class OnCluster:
    """A `Machine`: seconds and bytes from profiles, penalties from an indicator.

    `computes` says how each format is run: {"int8": ComputeSpec(format="int8", …)}. An operator can have the formats in
    which a device's profile has it, or of which the kernel itself says the cost. `smaller` is the step recorded with a
    smaller batch: where profiles have that, too, other batches lie on the line through both; else they are taken as
    proportional in what grows with them.
    """

    def __init__(
        self,
        graph: StepGraph,
        profiles: Mapping[str, DeviceProfile],
        cluster: Cluster,
        penalties: Mapping[str, Mapping[str, float]],
        computes: Mapping[str, ComputeSpec],
        *,
        settings: StepSettings | None = None,
        keep_float: Sequence[str] = (),
        smaller: StepGraph | None = None,
    ) -> None:
        self.graph, self.profiles, self.cluster = graph, dict(profiles), cluster
        self.penalties, self.computes = penalties, dict(computes)
        names = [op.name for op in graph.ops]
        wrong = [pattern for pattern in keep_float if not fnmatch.filter(names, pattern)]
        if wrong:
            fix = did_you_mean(wrong[0], names)
            raise PlanError([Problem(what="matches no operator", where="keep_float", value=wrong[0], fix=fix)])
        kept = {name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in keep_float)}
        self.predictor = Predictor.make(graph, Plan(), self.profiles, cluster, settings, smaller=smaller)
        steps = (self.predictor.locals, self.predictor.smaller)
        self._latest: dict[tuple[str, int], tuple[Assignment, Local]] = {
            (kind, local.graph.samples): ({}, local) for locals_ in steps for kind, local in locals_.items()
        }
        self._formats = {
            kind: {
                op.name: [FLOAT, *(f for f in self.computes if self._measured(kind, op.name, f))]
                for op in graph.ops
                if op.name in penalties and op.name not in kept
            }
            for kind in self.kinds
        }
        self._memories: dict[tuple[str, tuple[tuple[str, str], ...]], MemoryUse] = {}

    def _measured(self, kind: str, operator: str, format: str) -> bool:
        if format not in self.penalties[operator]:
            return False
        op = self.graph.ops[self.graph.position[operator]]
        asked = OperatorUnderPlan(operator, op.call, Plan(compute={operator: self.computes[format]}))
        measured = operator_key(op.call, IMPLEMENTATIONS.way(asked)) in self.profiles[kind].by_operator
        return measured or told(op.call, self.computes[format]) is not None

    @cached_property
    def kinds(self) -> Mapping[str, int]:
        """Of the cluster."""
        return {name: kind.count for name, kind in self.cluster.devices.items()}

    @cached_property
    def operators(self) -> Sequence[str]:
        """Those that some device has in more than float."""
        wanted = {name for formats in self._formats.values() for name, own in formats.items() if len(own) > 1}
        return [op.name for op in self.graph.ops if op.name in wanted]

    @property
    def batch(self) -> int:
        """As recorded."""
        return self.graph.samples

    def formats(self, kind: str, operator: str) -> Sequence[str]:
        """What was measured there."""
        return self._formats[kind][operator]

    def penalty(self, operator: str, format: str) -> float:
        """The indicator's."""
        return 0.0 if format == FLOAT else self.penalties[operator][format]

    def limit(self, kind: str) -> int | None:
        """The cluster file's, else the profile's."""
        said = self.cluster.devices[kind].memory_gb
        return int(said * 1e9) if said is not None else self.profiles[kind].memory.limit

    def plan_of(self, assignment: Assignment, why: str = "") -> Plan:
        """An assignment as a plan."""
        chosen = {op: replace(self.computes[f], why=why) for op, f in assignment.items() if f != FLOAT}
        return Plan(compute=chosen)

    def _local(self, kind: str, assignment: Assignment, batch: int) -> Local:
        """The step of one device with a recorded batch; what changed since it was last asked is looked up anew."""
        before, local = self._latest[kind, batch]
        changed = {op for op in self.operators if before.get(op, FLOAT) != assignment.get(op, FLOAT)}
        if changed:
            local = local.replaced(self.plan_of(assignment), changed)
            self._latest[kind, batch] = (dict(assignment), local)
        return local

    def _lane(self, kind: str, assignment: Assignment, batch: int) -> Lane:
        local = self._local(kind, assignment, self.batch)
        small = self.predictor.smaller.get(kind)
        smaller = {}
        if small is not None and batch != self.batch:
            smaller = {kind: self._local(kind, assignment, small.graph.samples)}
        locals_ = {**self.predictor.locals, kind: local}
        return replace(self.predictor, locals=locals_, smaller=smaller, batches={kind: batch}).lane(kind)

    def work(self, kind: str, assignment: Assignment, batch: int) -> float:
        """What it computes by itself."""
        lane = self._lane(kind, assignment, batch)
        return lane.computing + lane.tail

    def step(self, plans: Plans, batches: Mapping[str, int]) -> float:
        """The replay of all devices."""
        lanes = [self._lane(kind, plans[kind], batches[kind]) for kind in self.kinds]
        return replay(lanes, self.predictor.collectives, self.predictor.first).period

    def memory(self, kind: str, assignment: Assignment, batch: int) -> int:
        """The process at its peak; activations grow with the batch, the rest doesn't."""
        key = (kind, tuple(sorted((op, f) for op, f in assignment.items() if f != FLOAT)))
        if key not in self._memories:
            self._memories[key] = memory_of(
                self._local(kind, assignment, self.batch), distributed=self.cluster.world > 1
            )
        return self._memories[key].of_batch(batch / self.batch).process

    def to_plan(self, allocation: Allocation, *, model: str | None = None) -> Plan:
        """One plan with a section for each kind of device."""
        devices = {}
        for kind, assignment in allocation.plans.items():
            own = self.plan_of(assignment)
            batch = allocation.batches[kind]
            low = len(own.compute)
            why = f"{low} of {len(self.operators)} operators low; {1e3 * self.work(kind, assignment, batch):.3g} ms"
            devices[kind] = Device(compute=own.compute, batch=None if batch == self.batch else batch, why=why)
        return Plan(devices=devices, model=model)
