"""What a prediction says: the step, each kind of device, who waits for whom, and what memory peaks at."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from bitwright.predict.limit import MemoryLimit
from bitwright.predict.local import Local
from bitwright.predict.memory import MemoryUse
from bitwright.predict.replay import StepReplay


@dataclass(frozen=True, kw_only=True)
class DevicePrediction:
    """One kind of device (or one device, in exact mode)."""

    name: str
    count: int
    computing: float
    """Seconds of its own work in a step, undisturbed."""
    busy: float
    """Share of the step in which it computes."""
    communicating: float
    """Share of the step in which a collective is under way."""
    waiting: float
    """Share of the step in which it does nothing."""
    phases: dict[str, float]
    memory: MemoryUse | None
    limit: MemoryLimit | None
    """None if nobody said how much memory it has."""
    stood_in: int
    """Operators that weren't measured in their format: their cost in float stands in."""

    @property
    def fits(self) -> bool | None:
        """Whether its memory, less the reserve, is enough for the whole process; None if nobody said what it has."""
        return None if self.memory is None or self.limit is None else self.limit.holds(self.memory.process)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
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


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One step of a cluster."""

    model: str
    seconds: float
    """From one step to the next."""
    devices: tuple[DevicePrediction, ...]
    buckets: tuple[int, ...]
    """Bytes of each, in order."""
    critical: tuple[str, ...]
    """What the step's length is made of, in order."""
    samples: int
    """In one step of all devices."""
    replay: StepReplay = field(repr=False, compare=False)
    locals: dict[str, Local] = field(repr=False, compare=False)

    @property
    def samples_per_second(self) -> float:
        """The cluster's speed."""
        return self.samples / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "model": self.model,
            "seconds": self.seconds,
            "samples_per_second": self.samples_per_second,
            "devices": [device.to_dict() for device in self.devices],
            "buckets": list(self.buckets),
            "critical": list(self.critical),
        }


def critical_path(replay: StepReplay) -> tuple[str, ...]:
    """Back from the end: who finished last, what it waited for, and so on to the start."""
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
