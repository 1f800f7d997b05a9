"""Memory of a step: its predicted peak, and the memory limit of a device.

The prediction follows the order of execution: allocations, saved tensors and releases. Plans leave a reserve free,
because predictions have errors and a process that exceeds the memory is killed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from bitwright.cluster.device_step import DeviceStep, PlacedOperator
from bitwright.profiling.cost_key import TensorSpec
from bitwright.profiling.device_profile import SavedTensors

_STATES = {"sgd": 1, "adamw": 2}  # tensors of a parameter's size that the optimizer keeps


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of one device."""

    weights: int
    gradients: int
    optimizer: int
    buffers: int
    buckets: int
    saved: int
    """Bytes that the forward pass saves for backward, without parameters."""
    peak: int
    """The maximum number of allocated bytes, including all of the above."""
    cause: str
    """The operator at the peak, and the direction."""
    process: int
    """The peak plus the memory of the process itself."""

    def of_batch(self, share: float) -> MemoryUse:
        """The memory of a batch `share` times as large. Only activations grow."""
        fixed = self.weights + self.gradients + self.optimizer + self.buffers
        more = int(max(0, self.peak - fixed) * (share - 1))
        saved = int(self.saved * share)
        return replace(self, saved=saved, peak=self.peak + more, process=self.process + more)


def memory_of(local: DeviceStep, *, distributed: bool = False) -> MemoryUse:
    """Simulate the allocations of a step."""
    walk = _Walk(local)
    graph, settings = local.graph, local.settings
    weights = sum(spec.bytes for spec in graph.parameters.values())
    scales = sum(spec.bytes for name, spec in local.trained if name.startswith("bitwright."))
    gradients = sum(spec.bytes for _, spec in local.trained)
    states = gradients * (_STATES[settings.optimizer] if settings.optimizer != "sgd" or settings.momentum else 0)
    fixed = weights + scales + states + graph.buffer_bytes + graph.input_bytes
    # DDP's buckets exist from the start and gradients are views of them; otherwise gradients appear during backward,
    # and those of earlier accumulated batches are kept.
    resident = gradients if distributed or settings.accumulate > 1 else 0
    peak, cause = walk.run(resident == 0)
    itself = local.profile.memory.process + (local.profile.memory.compiler if local.compiled else 0)
    after = gradients if resident == 0 else 0
    if after > peak:
        peak, cause = after, "the optimizer, after backward"
    return MemoryUse(
        weights=weights + scales,
        gradients=gradients,
        optimizer=states,
        buffers=graph.buffer_bytes,
        buckets=gradients if distributed else 0,
        saved=walk.saved_bytes,
        peak=fixed + resident + peak,
        cause=cause,
        process=fixed + resident + peak + itself,
    )


def saved_by_operator(local: DeviceStep) -> dict[str, int]:
    """The bytes that forward saves for backward, by the first operator that saves them."""
    walk = _Walk(local)
    found = {block.op.name: own for block, own in zip(local.blocks, walk.own, strict=True)}
    for place, users in walk.saved_by.items():
        if place in walk.sizes:
            found[local.blocks[min(users)].op.name] += walk.sizes[place]
    return found


class _Walk:
    """Blocks of memory by name: blocks of the recorded graph by number, results of casts by operator and port."""

    def __init__(self, local: DeviceStep) -> None:
        self.local = local
        self.sizes: dict[object, int] = {}
        self.last_read: dict[object, int] = {}
        self.saved_by: dict[object, list[int]] = defaultdict(list)
        self.own: list[int] = []
        self.made: list[list[object]] = []
        graph = local.graph
        known = {number for number, storage in enumerate(graph.storages) if storage.kind != "op"}
        self.known = known
        self.now: dict[int, object] = {}  # recorded memory whose tensor is another block under this plan
        self.seen: set[object] = set(known)
        for index, block in enumerate(local.blocks):
            for read in block.op.reads:
                self.last_read[self._at(read)] = index
            self.made.append(self._make(index, block))
            self._keep(index, block)
            if block.op.writes and (block.op.name, "output") in self.sizes:  # readers get the result of the cast
                self.now[block.op.writes[0]] = (block.op.name, "output")
        for place in graph.loss_reads:
            self.last_read[self._at(place)] = len(local.blocks)
        self.saved_bytes = sum(self.own) + sum(self.sizes[p] for p in self.saved_by if p in self.sizes)
        self.saved_bytes += sum(
            graph.storages[p].bytes for p in self.saved_by if p in known and graph.storages[p].kind == "input"
        )

    def _at(self, place: int) -> object:
        return self.now.get(place, place)

    def _make(self, index: int, block: PlacedOperator) -> list[object]:
        """The blocks that an operator and its casts allocate."""
        made: list[object] = []
        op, execution = block.op, block.execution
        for number, (place, spec) in enumerate(zip(op.writes, op.outputs, strict=True)):
            if place in self.seen:
                continue
            self.seen.add(place)
            if number == 0 and execution.passes_through:
                self.now[place] = self._at(op.reads[0])
            elif number or execution.format != "within-cast":
                self.sizes[place] = _scaled(self.local.graph.storages[place].bytes, spec, block.gives)
                made.append(place)
        for placed in block.casts:
            name = (op.name, placed.cast.port)
            self.sizes[name] = placed.tensor.bytes
            self.last_read[name] = index
            made.append(name)
        return made

    def _place(self, block: PlacedOperator, label: str) -> object | None:
        if label != "output" and (block.op.name, label) in self.sizes:
            return (block.op.name, label)
        return self._raw(block, label)

    def _raw(self, block: PlacedOperator, label: str) -> object | None:
        """The tensor at a port before its cast."""
        if label == "output":
            if block.execution.format == "within-cast":
                return self._at(block.op.reads[0])
            return self._at(block.op.writes[0]) if block.op.writes else None
        for (name, _), place in zip(block.op.call.ports, block.op.reads, strict=True):
            if name == label:
                return self._at(place)
        return None

    def _keep(self, index: int, block: PlacedOperator) -> None:
        if not block.op.has_backward:
            self.own.append(0)
            return
        kept = block.cost.saved or SavedTensors(ports=list(block.op.saved), own=block.op.saved_own)
        own = kept.own
        places = [self._place(block, label) for label in kept.ports]
        for placed in block.casts:
            saved = placed.cost.saved
            own += saved.own if saved is not None else 0
            if saved is not None and "input" in saved.ports:
                places.append(self._raw(block, placed.cast.port))
            if saved is not None and "output" in saved.ports:
                places.append((block.op.name, placed.cast.port))
        for place in places:
            if place is not None:
                self.saved_by[place].append(index)
        self.own.append(own)

    def run(self, gradients_come: bool) -> tuple[int, str]:
        """The peak above the memory that always exists, and its cause."""
        blocks = self.local.blocks
        alive = peak = 0
        cause = "nothing"
        gone: dict[int, list[object]] = defaultdict(list)
        for place, index in self.last_read.items():
            if place in self.sizes and place not in self.saved_by:
                gone[index].append(place)
        for index, block in enumerate(blocks):
            alive += sum(self.sizes[place] for place in self.made[index]) + self.own[index]
            if alive > peak:
                peak, cause = alive, f"{block.op.name}, forward"
            alive -= sum(self.sizes[place] for place in gone[index])
        released: dict[int, list[object]] = defaultdict(list)
        for place, users in self.saved_by.items():
            if place in self.sizes:
                released[min(users)].append(place)
        errors = _Errors(blocks)
        for index in range(len(blocks) - 1, -1, -1):
            block = blocks[index]
            alive += errors.before(index)
            if gradients_come:
                alive += sum(spec.bytes for _, spec in block.gradients)
            if alive > peak:
                peak, cause = alive, f"{block.op.name}, backward"
            alive -= errors.after(index) + self.own[index]
            alive -= sum(self.sizes[place] for place in released[index])
        return peak, cause


class _Errors:
    """Gradients of activations. Each exists from the backward of its last reader to that of its producer."""

    def __init__(self, blocks: list[PlacedOperator]) -> None:
        self.blocks = blocks
        self.alive: dict[int, int] = {}

    def before(self, index: int) -> int:
        """Bytes that this operator's backward allocates: one gradient for each activation that requires one."""
        more = 0
        block = self.blocks[index]
        for (_, spec), place, source in zip(block.op.call.ports, block.op.reads, block.op.sources, strict=True):
            if spec.grad and source.startswith("op:") and place not in self.alive and place not in block.op.writes:
                self.alive[place] = spec.bytes
                more += spec.bytes
        return more

    def after(self, index: int) -> int:
        """Bytes that it frees: the gradient of its output."""
        return sum(self.alive.pop(place, 0) for place in self.blocks[index].op.writes if self._maker(index, place))

    def _maker(self, index: int, place: int) -> bool:
        return place not in self.blocks[index].op.reads


def _scaled(bytes: int, spec: TensorSpec, gives: str) -> int:
    """Memory of a tensor whose type differs from the recorded one."""
    if not spec.is_float or gives == spec.dtype or gives not in ("float32", "bfloat16", "float16", "float64"):
        return bytes
    return bytes * spec.with_(dtype=gives).bytes // max(spec.bytes, 1)


# -- the limit ---------------------------------------------------------------------------------------------------

RESERVE = 0.07
"""Share of a device's memory that plans leave free. Most processes peaked at up to 5 % above their prediction."""


@dataclass(frozen=True, kw_only=True)
class MemoryLimit:
    """The memory of a device and the share of it that plans leave free.

    >>> limit = MemoryLimit(total=10 * 10**9, reserve=0.07)
    >>> limit.usable, limit.holds(9_300_000_000), limit.holds(9_300_000_001)
    (9300000000, True, False)
    >>> print(limit)
    9.3 GB (10 GB less 7 % in reserve)
    """

    total: int
    """All bytes of the device."""
    reserve: float = RESERVE
    """A share between 0 and 1."""

    @property
    def usable(self) -> int:
        """Bytes that a process may use according to its prediction."""
        return self.total - round(self.total * self.reserve)

    def holds(self, process: int) -> bool:
        """Whether a process with this predicted peak fits."""
        return process <= self.usable

    def __str__(self) -> str:
        if not self.reserve:
            return size(self.total)
        return f"{size(self.usable)} ({size(self.total)} less {100 * self.reserve:.3g} % in reserve)"


def describe_limits(limits: Mapping[str, MemoryLimit | None]) -> str:
    """Describe the memory limit of each kind of device; kinds with the same limit share an entry."""
    alike: dict[str, list[str]] = {}
    for name, limit in limits.items():
        alike.setdefault("unknown" if limit is None else str(limit), []).append(name)
    reserved = any(limit is not None and limit.reserve for limit in limits.values())
    why = "; the reserve covers errors of predictions (memory_reserve in cluster.yaml)" if reserved else ""
    return ", ".join(f"{' and '.join(names)} {text}" for text, names in alike.items()) + why


def size(bytes: int) -> str:
    """Format bytes as megabytes or gigabytes.

    >>> size(9_300_000_000), size(4_200_000)
    ('9.3 GB', '4.2 MB')
    """
    return f"{bytes / 1e9:.3g} GB" if bytes >= 1e7 else f"{bytes / 1e6:.3g} MB"
