"""The result of a prediction: step time, devices, waiting times, memory and the critical path."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bitwright.cluster.data_parallel import LaneReplay, StepReplay
from bitwright.cluster.device_step import DeviceStep
from bitwright.cluster.memory import MemoryLimit, MemoryUse, describe_limits
from bitwright.core import display, formatting
from bitwright.core.arguments import strict
from bitwright.core.display import Summarized, Table
from bitwright.core.errors import Problem
from bitwright.core.files import write_text


@dataclass(frozen=True, kw_only=True)
class DevicePrediction:
    """One kind of device (or one device, in exact mode)."""

    name: str
    count: int
    computing: float
    """Seconds of its own work in a step, without contention."""
    busy: float
    """Share of the step during which it computes."""
    communicating: float
    """Share of the step during which a collective runs."""
    waiting: float
    """Share of the step during which it waits."""
    phases: dict[str, float]
    memory: MemoryUse | None
    limit: MemoryLimit | None
    """None if the memory of the device is unknown."""
    stood_in: int
    """The number of operators without a cost in their format; their float cost is used."""

    @property
    def fits(self) -> bool | None:
        """Whether the process fits into the memory minus the reserve; None if the memory is unknown."""
        return None if self.memory is None or self.limit is None else self.limit.holds(self.memory.process)

    def cells(self) -> tuple[object, ...]:
        """The row of the device in a summary."""
        memory = self.memory
        return (
            self.name,
            self.count,
            f"{1e3 * self.computing:.2f} ms",
            f"{100 * self.busy:.0f} %",
            f"{100 * self.communicating:.0f} %",
            f"{100 * self.waiting:.0f} %",
            None if memory is None else formatting.size(memory.peak),
            None if memory is None else memory.cause,
            None if memory is None else formatting.size(memory.process),
            None if self.limit is None else formatting.size(self.limit.usable),
            {True: "yes", False: "no", None: None}[self.fits],
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the prediction as JSON-compatible data."""
        known = asdict(self)
        del known["limit"]
        limit = self.limit
        return {
            **known,
            "memory_limit": None if limit is None else limit.total,
            "memory_reserve": None if limit is None else limit.reserve,
            "memory_usable": None if limit is None else limit.usable,
            "fits": self.fits,
        }


@strict
@dataclass(frozen=True, kw_only=True, repr=False)
class Prediction(Summarized):
    """The predicted training step of a cluster, as `bitwright.predict` returns it.

    >>> from bitwright import load_workload, predict, profile
    >>> workload = load_workload("digits-untrained")
    >>> prediction = predict(workload, profile(workload, published="nvidia-t4", batch=8), batch=8)
    >>> prediction.samples, [device.name for device in prediction.devices], prediction.devices[0].fits
    (8, ['device'], True)
    """

    model: str
    seconds: float
    """Seconds from one step to the next."""
    devices: tuple[DevicePrediction, ...]
    buckets: tuple[int, ...]
    """The bytes of each gradient bucket, in order."""
    critical: tuple[str, ...]
    """The critical path: the phases that determine the step time, in order."""
    samples: int
    """Samples of one step on all devices."""
    replay: StepReplay = field(compare=False)
    locals: dict[str, DeviceStep] = field(compare=False)
    warnings: tuple[Problem, ...] = ()
    """Reasons to doubt the prediction. Each was also logged."""

    def __repr__(self) -> str:
        count = sum(device.count for device in self.devices)
        speed = f"{self.samples_per_second:.0f} samples/s"
        return f"Prediction({self.model!r}, {1e3 * self.seconds:.3g} ms per step, {speed}, devices={count})"

    def summary(self) -> Iterator[Table | str]:
        """The step time, each kind of device, and the critical path."""
        yield f"a step takes {1e3 * self.seconds:.2f} ms, {self.samples_per_second:.0f} samples per second"
        heads = "device #count #compute #busy #collectives #waits #tensors peak #process #limit fits"
        yield Table(heads.split(), [device.cells() for device in self.devices], most=20)
        if any(device.limit is not None for device in self.devices):
            yield f"memory limit of a process: {describe_limits(self.limits)}"
        if len(self.devices) > 1:
            yield "a device waits for others and for collectives; collectives also overlap with its own work"
        for device in self.devices:
            if device.stood_in:
                yield f"{device.name}: {device.stood_in} operators have no time in their format; float times are used"
        if self.without_scaling:
            kinds = ", ".join(self.without_scaling)
            yield f"the step excludes fp16 loss scaling: the profile of {kinds} doesn't have it"
        yield "critical path: " + " → ".join(self.critical)

    def plot(self) -> display.Chart:
        """The time that each kind of device computes in a step."""
        bars = [(one.name, f"{1e3 * one.computing:.2f} ms", one.computing) for one in self.devices]
        return display.bar_chart(bars, label="Own work in a step")

    @property
    def samples_per_second(self) -> float:
        """The speed of the cluster."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def limits(self) -> dict[str, MemoryLimit | None]:
        """The memory limit of each kind of device."""
        kinds = (run.lane.kind for run in self.replay.lanes)
        return {kind: device.limit for kind, device in zip(kinds, self.devices, strict=True)}

    @property
    def without_scaling(self) -> list[str]:
        """Kinds of devices whose profile has no time for the loss scaling that fp16 needs."""
        return [name for name, local in self.locals.items() if local.lacks_scaling]

    def to_dict(self) -> dict[str, Any]:
        """Return the prediction as JSON-compatible data."""
        return {
            "model": self.model,
            "seconds": self.seconds,
            "samples_per_second": self.samples_per_second,
            "devices": [device.to_dict() for device in self.devices],
            "buckets": list(self.buckets),
            "critical": list(self.critical),
            "warnings": [asdict(problem) for problem in self.warnings],
        }


def critical_path(replay: StepReplay) -> tuple[str, ...]:
    """Follow the dependencies back from the device that finished last."""
    last = max(replay.lanes, key=lambda run: run.finished)
    words = [f"{last.lane.name}: clipping and optimizer, {_ms(last.lane.tail)}"]
    if not replay.sent or last.computed > replay.sent[-1].end:
        lane = last.lane
        words.append(f"{lane.name}: backward to its end, {_ms(lane.computing - lane.turned)}")
    else:
        index = len(replay.sent) - 1
        end = replay.sent[index].end
        while index > 0 and not replay.sent[index].waited_for:
            index -= 1
        sent = replay.sent[index]
        span = f"bucket {index}" if index == len(replay.sent) - 1 else f"buckets {index} to {len(replay.sent) - 1}"
        words.append(f"collectives of {span}, {_ms(end - sent.start)}")
        first = sent.waited_for or last.lane.name
        lane = next(run.lane for run in replay.lanes if run.lane.name == first)
        words.append(f"{first}: backward to bucket {index}, {_ms(max(0.0, lane.ready[index] - lane.turned))}")
    words.append(f"{lane.name}: forward, {_ms(lane.turned)}")
    return tuple(reversed(words))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


_COMPUTE, _COMMUNICATE = 1, 2


def trace_events(prediction: Prediction) -> list[dict[str, Any]]:
    """Return Chrome trace events. Each kind of device is a process with two lanes; times are microseconds."""
    zero = prediction.replay.start
    found: list[dict[str, Any]] = []
    for number, run in enumerate(prediction.replay.lanes, 1):
        name = run.lane.name
        local = prediction.locals[run.lane.kind]
        shown = f"{name} ×{run.lane.count}" if run.lane.count > 1 else name
        found.append({"ph": "M", "pid": number, "name": "process_name", "args": {"name": shown}})
        for lane, word in ((_COMPUTE, "compute"), (_COMMUNICATE, "communicate")):
            found.append({"ph": "M", "pid": number, "tid": lane, "name": "thread_name", "args": {"name": word}})
        found += [_event(number, _COMPUTE, *piece, zero) for piece in _compute(local, run)]
        first = zero + prediction.replay.first
        if first > zero:
            found.append(_event(number, _COMMUNICATE, "broadcast of buffers", "collective", zero, first, {}, zero))
        for sent in prediction.replay.sent:
            words = {"bytes": prediction.buckets[sent.bucket], "waited_for": sent.waited_for or "the one before"}
            name = f"all_reduce bucket {sent.bucket}"
            found.append(_event(number, _COMMUNICATE, name, "collective", sent.start, sent.end, words, zero))
    return found


def _compute(local: DeviceStep, run: LaneReplay) -> Iterator[tuple[str, str, float, float, dict[str, Any]]]:
    """Yield the operators of one batch, the last one of an accumulated step.

    Their recorded times are scaled to the lane's forward and backward, which depend on its batch and include DDP.
    """
    lane = run.lane
    forward, backward = local.forward_seconds + local.loss.forward, local.backward_seconds
    there = (lane.turned - lane.begun) / forward if forward else 0.0
    back = (lane.computing - lane.turned) / backward if backward else 0.0
    gap = local.gap / max(len(local.blocks), 1)
    work = lane.begun
    for block in local.blocks:
        start, work = work, work + (block.forward + gap) * there
        words = {"format": block.execution.format, "casts": [placed.cast.kind for placed in block.casts]}
        yield block.op.name, "forward", run.time_at(start), run.time_at(work), words
    for block, end in zip(reversed(local.blocks), local.backward_offsets, strict=True):
        at = lane.turned + end * back
        if block.backward > 0:
            yield block.op.name, "backward", run.time_at(at - block.backward * back), run.time_at(at), {}
    yield "clip and optimizer", "tail", run.finished - lane.tail, run.finished, {}


def _event(
    pid: int, tid: int, name: str, category: str, start: float, end: float, words: dict[str, Any], zero: float
) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": name,
        "cat": category,
        "ts": round(1e6 * (start - zero), 3),
        "dur": round(1e6 * max(0.0, end - start), 3),
        "args": words,
    }


@strict
def write_trace(prediction: Prediction, path: str | Path) -> Path:
    """Write a Chrome trace of the predicted step."""
    return write_text(Path(path), json.dumps({"traceEvents": trace_events(prediction), "displayTimeUnit": "ms"}))
