"""The data-parallel step: the order of gradients, DDP's gradient buckets, and the replay of devices and collectives."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bitwright.plan import FoldSpec, Plan
from bitwright.profiling.cost_key import TensorSpec
from bitwright.profiling.execution import Cast, Execution
from bitwright.profiling.step_graph import StepGraph, StepOp

Gradient = tuple[str, TensorSpec]

# The gradients that each folding strategy adds at the weight, in order. Strategy 0 adds none, 4 adds them at the norm.
_AT_WEIGHT: Mapping[int, tuple[str, ...]] = {
    0: ("scale", "weight"),
    1: ("beta", "scale", "weight", "gamma"),
    2: ("beta", "scale", "gamma", "weight"),
    3: ("scale", "beta", "gamma", "weight"),
    4: ("weight", "scale", "gamma"),
}
_PLAIN: tuple[str, ...] = ("weight", "scale")


def gradients_of(graph: StepGraph, op: StepOp, execution: Execution, plan: Plan) -> tuple[Gradient, ...]:
    """Return the names and tensors of an operator's gradients, including scales of quantizers."""
    own = _parameters(graph, op)
    folded = plan.folds.get(op.name)
    if folded is not None and folded.into in graph.position:
        left = {"bias"} if folded.strategy == 4 else set()
        own = {port: gradient for port, gradient in own.items() if port in left}
    fold = next(((norm, spec) for norm, spec in plan.folds.items() if spec.into == op.name), None)
    return tuple(dict(_in_order(graph, op, execution, own, fold)).items())


def _in_order(
    graph: StepGraph, op: StepOp, execution: Execution, own: dict[str, Gradient], fold: tuple[str, FoldSpec] | None
) -> Iterator[Gradient]:
    output = execution.cast_at("output")
    if output is not None:
        yield from _scale(op, output)
    casts = [cast for cast in execution.casts if cast.port != "output"]
    cast_ports = {cast.port for cast in casts} | ({"weight"} if fold is not None else set())
    direct = [gradient for port, gradient in own.items() if port not in cast_ports]
    yield from sorted(direct, key=lambda gradient: graph.gradient_order.index(gradient[0])) if direct[1:] else direct
    ports = [cast.port for cast in casts]
    if "weight" in cast_ports and "weight" not in ports:
        ports.append("weight")
    for port in reversed(ports):
        cast = execution.cast_at(port)
        pieces = {
            "weight": [own[port]] if port in own else [],
            "scale": list(_scale(op, cast)) if cast is not None else [],
        }
        words = _PLAIN
        if port == "weight" and fold is not None:
            norm, spec = fold
            affine = _parameters(graph, graph.by_name[norm]) if norm in graph.position else {}
            pieces["gamma"] = [affine["weight"]] if "weight" in affine else []
            pieces["beta"] = [affine["bias"]] if "bias" in affine else []
            words = _AT_WEIGHT[spec.strategy]
        for word in words:
            yield from pieces[word]


def _parameters(graph: StepGraph, op: StepOp) -> dict[str, Gradient]:
    """The trained parameters by port, without those that an earlier operator also reads."""
    found: dict[str, Gradient] = {}
    for source, (port, spec) in zip(op.sources, op.call.ports, strict=True):
        name = source.removeprefix("param:")
        if source.startswith("param:") and spec.grad and graph.uses.get(name) == op.name:
            found[port] = (name, spec)
    return found


def _scale(op: StepOp, cast: Cast) -> Iterator[Gradient]:
    """The gradient of a learned scale, unless another operator owns it."""
    if not cast.learns or (cast.state or op.name).rpartition(":")[0] not in ("", op.name):
        return
    spec = op.call.port(cast.port)
    channels = cast.per_channel and cast.weight
    shape = (spec.shape[0],) if channels and spec is not None and spec.shape else ()
    yield f"bitwright.{op.name}:{cast.port}.scale", TensorSpec(shape, "float32", True)


_MIB = 1 << 20


@dataclass(frozen=True)
class Bucket:
    """Gradients that one all-reduce sends."""

    names: tuple[str, ...]
    bytes: int


def limits(bucket_cap_mb: float | None) -> list[int]:
    """DDP's size limits. Without a user's size, the first bucket is smaller."""
    from torch.nn.parallel.distributed import _BucketCapacityConfig

    config = _BucketCapacityConfig.create(bucket_cap_mb, None, False)  # type: ignore[arg-type]  # it also takes floats
    first, rest = config.first_bucket_bytes_cap, config.bucket_bytes_cap
    return [first, rest] if first < rest else [rest]


@lru_cache(maxsize=4096)
def _stand_in(shape: tuple[int, ...], dtype: str) -> Tensor:
    """A tensor without memory. It is cached, because planners compute buckets thousands of times."""
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


def make_buckets(trained: Sequence[tuple[str, TensorSpec]], bucket_cap_mb: float | None) -> list[Bucket]:
    """Return the buckets that DDP uses after its first step, when it knows the order of gradients.

    >>> specs = [(name, TensorSpec((1 << 18,), "float32", True)) for name in "abc"]
    >>> [bucket.names for bucket in make_buckets(specs, 2)]
    [('a', 'b'), ('c',)]
    """
    if not trained:
        return []
    stand_ins = [_stand_in(spec.shape, spec.dtype) for _, spec in trained]
    assign: Any = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]
    indices, _ = assign(stand_ins, limits(bucket_cap_mb), [False] * len(stand_ins))
    # torch groups by dtype; buckets are sent in the order of their last gradients
    found = sorted(indices, key=max)
    return [Bucket(tuple(trained[i][0] for i in group), sum(trained[i][1].bytes for i in group)) for group in found]


# -- replay ------------------------------------------------------------------------------------------------------


def on_line(share: float, at: float, low: float, high: float) -> float:
    """Seconds of a batch that is `share` times the recorded one, by linear interpolation.

    The recorded batch takes `high`, and a batch that is `at` times as large takes `low`.

    >>> on_line(0.25, 0.5, 6.0, 10.0)
    4.0
    """
    return max(0.0, low + (share - at) / (1 - at) * (high - low))


@dataclass(frozen=True)
class Lane:
    """One device, or several equal ones. Work is in seconds of computing at full speed since the start of the step."""

    name: str
    ready: tuple[float, ...]
    """The work after which each bucket is ready."""
    computing: float
    """The work until the end of backward."""
    tail: float
    """The work after the last collective: clipping and the optimizer."""
    contention: float = 0.0
    """The share of its speed that is lost during a collective."""
    count: int = 1
    stretch: float = 1.0
    """How much longer a collective takes while this device computes."""
    kind: str = ""
    """The kind of device. In exact mode, each device of a kind has its own lane and name."""
    begun: float = 0.0
    """The work before the forward pass of the last batch."""
    turned: float = 0.0
    """The work before the backward pass of the last batch."""

    def scaled(self, factor: float) -> Lane:
        """The lane of a device that takes `factor` times as long."""
        if factor == 1:
            return self
        times = {name: factor * getattr(self, name) for name in ("computing", "tail", "begun", "turned")}
        return replace(self, ready=tuple(factor * ready for ready in self.ready), **times)

    def of_batch(self, share: float, at: float, other: Lane) -> Lane:
        """The lane of a batch `share` times as large. `other` is the lane of a batch `at` times as large.

        The work after the collectives doesn't depend on the batch.
        """
        return replace(
            self,
            ready=tuple(on_line(share, at, low, high) for low, high in zip(other.ready, self.ready, strict=True)),
            begun=on_line(share, at, other.begun, self.begun),
            turned=on_line(share, at, other.turned, self.turned),
            computing=on_line(share, at, other.computing, self.computing),
        )


@dataclass(frozen=True)
class Sent:
    """One collective."""

    bucket: int
    start: float
    end: float
    waited_for: str
    """The last lane that was ready; "" if the previous collective ended later."""


@dataclass
class LaneReplay:
    """The replay of one lane: points (time, work), between which the speed is constant."""

    lane: Lane
    knots: list[tuple[float, float]] = field(default_factory=list)
    computed: float = 0.0
    """The end of backward."""
    finished: float = 0.0
    """The end of the step."""

    def time_at(self, work: float) -> float:
        """The time at which this much work is done."""
        index = bisect_left([point[1] for point in self.knots], work)  # the first time it is reached
        if index == 0:
            return self.knots[0][0]
        if index == len(self.knots):
            time, done = self.knots[-1]
            return time + work - done
        (t0, w0), (t1, w1) = self.knots[index - 1], self.knots[index]
        return t0 + (work - w0) * (t1 - t0) / (w1 - w0) if w1 > w0 else t0


@dataclass
class StepReplay:
    """The replay of one step on all lanes."""

    lanes: list[LaneReplay]
    sent: list[Sent]
    start: float
    """The start of the first lane, or of the collective before the forward passes."""
    first: float = 0.0
    """Seconds of the collective before the forward passes."""
    period: float = 0.0


def replay(
    lanes: Sequence[Lane], collectives: Sequence[float], first: float = 0.0, *, overlap: bool = True
) -> StepReplay:
    """Replay steps until they repeat, and return the last one.

    A collective starts when every device has its bucket ready and the previous collective is done. During a collective,
    devices whose processors send the messages compute more slowly. The cost of a replay grows with lanes times buckets,
    not with operators. `collectives` has the seconds of each bucket, and `first` those of the collective before the
    forward passes. Without `overlap`, no collective starts before the end of backward.
    """
    starts = [0.0] * len(lanes)
    before = None
    for _ in range(3):  # devices finish at different times, and the next step starts there
        step = _step(lanes, collectives, first, starts, overlap)
        starts = [lane.finished for lane in step.lanes]
        mark = max(starts)
        step.period = mark - before if before is not None else mark
        before = mark
    return step


def _step(
    lanes: Sequence[Lane], collectives: Sequence[float], first: float, starts: list[float], overlap: bool
) -> StepReplay:
    together = max(starts) + first if first else 0.0
    begun = [max(start, together) for start in starts]
    replays = [LaneReplay(lane, [(time, 0.0)]) for lane, time in zip(lanes, begun, strict=True)]
    sent: list[Sent] = []
    through = 0.0
    for bucket, seconds in enumerate(collectives):
        start, last = through, ""
        for run in replays:
            lane = run.lane
            time, work = run.knots[-1]
            ready = time + max(0.0, (lane.ready[bucket] if overlap else lane.computing) - work)
            if ready > start:
                start, last = ready, lane.name
        through = start + _stretched(replays, start, seconds)
        sent.append(Sent(bucket, start, through, last))
        for run in replays:
            _advance(run, start, through)
    for run in replays:
        time, work = run.knots[-1]
        left = run.lane.computing - work
        if left > 0:
            run.knots.append((time + left, run.lane.computing))
        run.computed = run.time_at(run.lane.computing)
        run.finished = max(run.computed, through) + run.lane.tail
    return StepReplay(replays, sent, min(begun) - first, first)


def _stretched(replays: Sequence[LaneReplay], start: float, seconds: float) -> float:
    """The duration of a collective that starts now; it is longer while a device that sends messages also computes."""
    ends = []
    for run in replays:
        time, work = run.knots[-1]
        left = run.lane.computing - work - max(0.0, start - time)
        if left > 0 and run.lane.stretch > 1:
            ends.append((left / (1.0 - run.lane.contention), run.lane.stretch))
    at = 0.0
    for end, _ in sorted(ends):
        pace = max(stretch for other, stretch in ends if other >= end)
        if at + seconds * pace <= end:
            return at + seconds * pace
        seconds -= (end - at) / pace
        at = end
    return at + seconds


def _advance(run: LaneReplay, start: float, end: float) -> None:
    """Advance a lane: at full speed until the start of the collective, and more slowly until its end."""
    whole, speed = run.lane.computing, 1.0 - run.lane.contention
    time, work = run.knots[-1]
    for until, rate in ((start, 1.0), (end, speed)):
        if until <= time:
            continue
        done = work + (until - time) * rate
        if done >= whole > work:
            run.knots.append((time + (whole - work) / rate, whole))
        work = min(done, whole)
        time = until
        run.knots.append((time, work))
