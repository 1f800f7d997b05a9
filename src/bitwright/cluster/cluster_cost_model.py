"""The cost model of a profiled cluster: it answers planners by simulating the step."""

from __future__ import annotations

import fnmatch
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from bitwright.cluster.cluster import Cluster
from bitwright.cluster.cost_lookup import kernel_estimate
from bitwright.cluster.cost_model import ACTIVATIONS, FLOAT, Assignment, Plans
from bitwright.cluster.data_parallel import Lane, StepReplay, replay
from bitwright.cluster.device_step import DeviceStep
from bitwright.cluster.memory import MemoryLimit, MemoryUse, memory_of, saved_by_operator
from bitwright.cluster.planners.precision import Allocation
from bitwright.cluster.predictor import Predictor
from bitwright.core.errors import PlanError, Problem, did_you_mean
from bitwright.plan import ComputeSpec, Device, Plan
from bitwright.profiling import DeviceProfile, OperatorUnderPlan, StepGraph, StepSettings
from bitwright.profiling.execution import IMPLEMENTATIONS, Execution
from bitwright.profiling.step_graph import StepOp
from bitwright.profiling.step_timer import operator_key

_Low = tuple[tuple[str, str], ...]  # operators that aren't in float


class ClusterCostModel:
    """A `CostModel` with seconds and bytes from profiles and penalties from sensitivity scores.

    `computes` says how each format is run: {"int8": ComputeSpec(format="int8", …)}. An operator can run in the
    formats that the device's profile contains for it, and in those whose cost the kernel estimates. `smaller` is the
    step recorded with a smaller batch. If the profile has both, other batch sizes are interpolated linearly; otherwise
    the parts that depend on the batch are assumed to be proportional to it. `samples` are those of a step of all
    devices; by default each device has as many as the recorded step.
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
        samples: int | None = None,
    ) -> None:
        self.graph, self.profiles, self.cluster = graph, dict(profiles), cluster
        self.total = samples
        self.penalties, self.computes = penalties, dict(computes)
        names = [op.name for op in graph.ops]
        wrong = [pattern for pattern in keep_float if not fnmatch.filter(names, pattern)]
        if wrong:
            fix = did_you_mean(wrong[0], names)
            raise PlanError(
                [
                    Problem(
                        what="matches no operator", where="keep_float", value=wrong[0], fix=fix, code="unknown-operator"
                    )
                ]
            )
        self.kept = {name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in keep_float)}
        self.predictor = Predictor.make(graph, Plan(), self.profiles, cluster, settings, smaller=smaller)
        steps = (self.predictor.locals, self.predictor.smaller)
        self._latest: dict[tuple[str, int], tuple[Assignment, DeviceStep]] = {
            (kind, local.graph.samples): ({}, local) for locals_ in steps for kind, local in locals_.items()
        }
        self._formats = {
            kind: {
                op.name: [FLOAT, *(f for f in self.computes if self._measured(kind, op.name, f))]
                for op in graph.ops
                if op.name in penalties and op.name not in self.kept
            }
            for kind in self.kinds
        }
        self._memories: dict[tuple[str, _Low], MemoryUse] = {}
        self._lanes: dict[tuple[str, _Low, int], Lane] = {}
        self._slowdowns: Mapping[str, float] = {}
        self._link = 1.0

    def rescale(self, slowdowns: Mapping[str, float], link: float = 1.0) -> None:
        """Devices compute and exchange messages so many times as long as in their profiles."""
        if dict(slowdowns) != self._slowdowns:
            self._lanes = {}
        self._slowdowns, self._link = dict(slowdowns), link

    @cached_property
    def unscored(self) -> Sequence[str]:
        """Operators that some device can run in a lower format but that have no sensitivity score."""
        return [
            op.name
            for op in self.graph.ops
            if any(
                format not in self.penalties.get(op.name, {}) and self._has(kind, op.name, format)
                for kind in self.kinds
                for format in self.computes
            )
        ]

    def _measured(self, kind: str, operator: str, format: str) -> bool:
        return format in self.penalties[operator] and self._has(kind, operator, format)

    def _has(self, kind: str, operator: str, format: str) -> bool:
        op = self.graph.ops[self.graph.position[operator]]
        measured = operator_key(op.call, self._execution(op, format)) in self.profiles[kind].by_operator
        return measured or kernel_estimate(op.call, self.computes[format]) is not None

    @cached_property
    def kinds(self) -> Mapping[str, int]:

        return {name: kind.count for name, kind in self.cluster.devices.items()}

    @cached_property
    def operators(self) -> Sequence[str]:
        """Operators that some device can run in a lower format than float."""
        wanted = {name for formats in self._formats.values() for name, own in formats.items() if len(own) > 1}
        return [op.name for op in self.graph.ops if op.name in wanted]

    @property
    def batch(self) -> int:

        return self.graph.samples

    @property
    def samples(self) -> int:

        return sum(self.kinds.values()) * self.batch if self.total is None else self.total

    def formats(self, kind: str, operator: str) -> Sequence[str]:
        """The formats in the device's profile."""
        return self._formats[kind][operator]

    def penalty(self, operator: str, format: str) -> float:
        """The sensitivity score."""
        return 0.0 if format == FLOAT else self.penalties[operator][format]

    def memory_limit(self, kind: str) -> MemoryLimit | None:
        """The limit of the cluster file, which `predict` uses too."""
        return self.cluster.memory_limit(kind, self.profiles[kind])

    def limit(self, kind: str) -> int | None:
        """The device's memory minus the reserve."""
        memory_limit = self.memory_limit(kind)
        return None if memory_limit is None else memory_limit.usable

    def plan_of(self, assignment: Assignment, why: str = "") -> Plan:
        """An assignment as a plan."""
        chosen = {op: replace(self.computes[f], why=why) for op, f in assignment.items() if f != FLOAT}
        return Plan(compute=chosen)

    def _local(self, kind: str, assignment: Assignment, batch: int) -> DeviceStep:
        """The step of one device with a recorded batch. Only operators that changed are looked up again."""
        before, local = self._latest[kind, batch]
        changed = {op for op in self.operators if before.get(op, FLOAT) != assignment.get(op, FLOAT)}
        if changed:
            local = local.replaced(self.plan_of(assignment), changed)
            self._latest[kind, batch] = (dict(assignment), local)
        return local

    def _low(self, assignment: Assignment) -> _Low:
        return tuple((op, f) for op in self.operators if (f := assignment.get(op, FLOAT)) != FLOAT)

    def lane(self, kind: str, assignment: Assignment, batch: int) -> Lane:
        """The work of one such device. Cached: planners ask for the same plans several times."""
        key = (kind, self._low(assignment), batch)
        if key not in self._lanes:
            local, small = self._local(kind, assignment, self.batch), self.predictor.smaller.get(kind)
            if small is not None:
                small = self._local(kind, assignment, small.graph.samples) if batch != self.batch else None
            lane = self.predictor.lane_of(kind, local, small, batch / self.batch)
            self._lanes[key] = lane.scaled(self._slowdowns.get(kind, 1.0))
        return self._lanes[key]

    def work(self, kind: str, assignment: Assignment, batch: int) -> float:
        """Seconds of the device's own computation."""
        lane = self.lane(kind, assignment, batch)
        return lane.computing + lane.tail

    def step(self, plans: Plans, batches: Mapping[str, int]) -> float:
        """Seconds of the simulated step of all devices."""
        return self._replay(plans, batches).period

    def _replay(self, plans: Plans, batches: Mapping[str, int]) -> StepReplay:
        lanes = [self.lane(kind, plans[kind], batches[kind]) for kind in self.kinds]
        return replay(lanes, *self.collectives)

    @property
    def collectives(self) -> tuple[list[float], float]:
        """Seconds of the collective of each bucket, and of the one before the forward pass."""
        sent = [self._link * seconds for seconds in self.predictor.collectives]
        return sent, self._link * self.predictor.first

    def step_shares(self, plans: Plans, batches: Mapping[str, int]) -> tuple[dict[str, float], float, float]:
        """Seconds that each kind computes, that the last device waits for messages, and of the whole step."""
        step = self._replay(plans, batches)
        own = {run.lane.kind: run.computed - run.knots[0][0] + run.lane.tail for run in step.lanes}
        sent = step.sent[-1].end if step.sent else 0.0
        return own, min(max(0.0, sent - run.computed) for run in step.lanes), step.period

    def memory(self, kind: str, assignment: Assignment, batch: int) -> int:
        """Peak bytes of the process. Activations grow with the batch size."""
        return self._memory(kind, assignment).of_batch(batch / self.batch).process

    def _memory(self, kind: str, assignment: Assignment) -> MemoryUse:
        key = (kind, self._low(assignment))
        if key not in self._memories:
            local = self._local(kind, assignment, self.batch)
            self._memories[key] = memory_of(local, distributed=self.cluster.world > 1)
        return self._memories[key]

    def parts(self, kind: str, assignment: Assignment, batch: int) -> Mapping[str, int]:
        """The parts of the predicted memory, and the activations that each operator saves."""
        share = batch / self.batch
        use = self._memory(kind, assignment).of_batch(share)
        local = self._local(kind, assignment, self.batch)
        kept, own = saved_by_operator(local), self.profiles[kind].memory
        fixed = use.weights + use.gradients + use.optimizer + use.buffers
        return {
            "weights": use.weights,
            "gradients": use.gradients,
            "optimizer state": use.optimizer,
            "buffers": use.buffers,
            "the process itself": own.process,
            "torch's compiler": own.compiler if local.compiled else 0,
            "temporary tensors at the peak": max(0, use.peak - fixed - use.saved),
            **{f"{ACTIVATIONS}{name}": int(share * bytes) for name, bytes in kept.items()},
        }

    @cached_property
    def _readable(self) -> Mapping[str, Sequence[str]]:
        """For each operator with several formats: the operators with several formats that it reads directly.

        Operators with a single format between them are skipped. Kernels with float outputs don't affect their readers.
        """
        choices = set(self.operators)
        behind: dict[str, set[str]] = {}  # choices on which an operator's result depends directly
        found: dict[str, Sequence[str]] = {}
        for op in self.graph.ops:
            sources = [source.removeprefix("op:") for source in op.sources if source.startswith("op:")]
            reached = {name for source in sources for name in behind.get(source, ())}
            behind[op.name] = reached if op.name not in choices else {op.name} if self._affects_readers(op) else set()
            if op.name in choices:
                found[op.name] = sorted(reached, key=lambda name: self.graph.position[name])
        return found

    def _affects_readers(self, op: StepOp) -> bool:
        """Whether an operator's format changes the dtype or strides of its result."""
        executions = [
            self._execution(op, format) for format in {f for kind in self.kinds for f in self.formats(kind, op.name)}
        ]
        recorded = op.outputs[0].dtype if op.outputs else None
        return any(
            execution.gives not in (None, recorded) or execution.cast_at("output") is not None
            for execution in executions
        )

    def _execution(self, op: StepOp, format: str) -> Execution:
        plan = Plan() if format == FLOAT else Plan(compute={op.name: self.computes[format]})
        return IMPLEMENTATIONS.execution(OperatorUnderPlan(op.name, op.call, plan))

    def reads(self, operator: str) -> Sequence[str]:
        return self._readable[operator]

    @cached_property
    def _input_sharers(self) -> Mapping[str, Sequence[str]]:
        """Groups by the memory that operators read; parameters exist in any case."""
        readers: dict[int, list[str]] = {}
        for name in self.operators:
            op = self.graph.ops[self.graph.position[name]]
            for place in dict.fromkeys(op.reads):
                if self.graph.storages[place].kind == "op":
                    readers.setdefault(place, []).append(name)
        found: dict[str, dict[str, None]] = {name: {} for name in self.operators}
        for names in readers.values():
            for name in names:
                found[name].update({other: None for other in names if other != name})
        return {name: list(others) for name, others in found.items()}

    def shares_input_with(self, operator: str) -> Sequence[str]:
        return self._input_sharers[operator]

    @cached_property
    def _alike(self) -> Mapping[str, Hashable]:
        """The calls recorded between the previous choice and each one, and the distances of their sources."""
        position, found = self.graph.position, {}
        begin = 0
        for name in self.operators:
            end = position[name] + 1
            found[name] = tuple(
                (op.call.key(), tuple(_offset(source, index, position) for source in op.sources))
                for index, op in enumerate(self.graph.ops[begin:end], begin)
            )
            begin = end
        return found

    def cost_key(self, kind: str, operator: str) -> Hashable:
        """Equal if the recorded calls are equal, because a profile has one cost for equal calls."""
        return (tuple(self.formats(kind, operator)), self._alike[operator])

    def to_plan(self, allocation: Allocation, *, model: str | None = None) -> Plan:
        """One plan with a section for each kind of device."""
        devices = {}
        for kind, assignment in allocation.plans.items():
            own = self.plan_of(assignment)
            batch = allocation.batches[kind]
            low = len(own.compute)
            why = f"{low} of {len(self.operators)} operators low; {1e3 * self.work(kind, assignment, batch):.3g} ms"
            devices[kind] = Device(compute=own.compute, batch=batch, why=why)
        return Plan(devices=devices, model=model)


def _offset(source: str, index: int, position: Mapping[str, int]) -> int | str:
    name = source.removeprefix("op:")
    return index - position[name] if source.startswith("op:") and name in position else source.partition(":")[0]
