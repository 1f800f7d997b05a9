"""What `bitwright predict` found, as a part of a record: each device's step, predicted and measured."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from pydantic import Field

from bitwright.cluster import Prediction
from bitwright.cluster.compare import StepComparison, TimePair
from bitwright.cluster.prediction import trace_events
from bitwright.core.documents import ResultModel

_DEVICES = 16  # kinds of devices that get a timeline; in exact mode there may be a thousand
_SPANS = 1200  # of one device: more can't be told apart on a screen


class Span(ResultModel):
    """Something that a device does."""

    name: str
    kind: str = Field(description="forward, backward, tail, or collective.")
    start_ms: float
    end_ms: float


class Device(ResultModel):
    """One kind of device, and how many there are."""

    name: str
    count: int
    computing_ms: float
    busy: float = Field(description="Share of the step.")
    communicating: float
    waiting: float
    phases_ms: dict[str, float] = Field(description="Predicted, in the order of a step.")
    memory_peak: int | None = Field(default=None, description="Bytes.")
    memory_cause: str | None = None
    memory_process: int | None = Field(default=None, description="Bytes of the whole process: what has to fit.")
    memory_limit: int | None = Field(default=None, description="Bytes that the device has.")
    memory_reserve: float = Field(
        default=0.0, description="Share of the limit that is left free, as predictions are some percent wrong."
    )
    stood_in: int = Field(default=0, description="Operators that weren't measured in their format.")
    spans: tuple[Span, ...] = ()


class Both(ResultModel):
    """Predicted and measured time of one thing."""

    name: str
    predicted_ms: float
    measured_ms: float


class Measured(ResultModel):
    """Real steps of the first device, beside the prediction."""

    steps: int
    step: Both
    phases: tuple[Both, ...]
    groups: tuple[Both, ...] = Field(description="Operators by kind, and casts.")
    drift: float | None = Field(description="How much longer a fixed piece of work takes than when it was profiled.")


class Forecast(ResultModel):
    """One plan on one device, or on a cluster."""

    name: str = Field(description="The precision or plan that was predicted; a later one of this name replaces it.")
    step_ms: float
    samples_per_second: float
    critical: tuple[str, ...]
    devices: tuple[Device, ...]
    left_out: int = Field(default=0, description="Devices that have no row, because there are too many.")
    measured: Measured | None = None


def forecast(prediction: Prediction, name: str, comparison: StepComparison | None = None) -> Forecast:
    """The part of a record."""
    spans = _spans(prediction)
    return Forecast(
        name=name,
        step_ms=1e3 * prediction.seconds,
        samples_per_second=prediction.samples_per_second,
        critical=prediction.critical,
        left_out=max(0, len(prediction.devices) - _DEVICES),
        devices=tuple(
            Device(
                name=device.name,
                count=device.count,
                computing_ms=1e3 * device.computing,
                busy=device.busy,
                communicating=device.communicating,
                waiting=device.waiting,
                phases_ms={phase: 1e3 * seconds for phase, seconds in device.phases.items()},
                memory_peak=None if device.memory is None else device.memory.peak,
                memory_cause=None if device.memory is None else device.memory.cause,
                memory_process=None if device.memory is None else device.memory.process,
                memory_limit=None if device.limit is None else device.limit.total,
                memory_reserve=0.0 if device.limit is None else device.limit.reserve,
                stood_in=device.stood_in,
                spans=tuple(_thin(spans[index])) if index < len(spans) else (),
            )
            for index, device in enumerate(prediction.devices[:_DEVICES])
        ),
        measured=None
        if comparison is None
        else Measured(
            steps=comparison.steps,
            step=_both(comparison.step),
            phases=tuple(map(_both, comparison.phases)),
            groups=tuple(map(_both, comparison.groups)),
            drift=comparison.drift,
        ),
    )


def _both(pair: TimePair) -> Both:
    return Both(name=pair.name, predicted_ms=1e3 * pair.predicted, measured_ms=1e3 * pair.measured)


def _spans(prediction: Prediction) -> list[list[Span]]:
    """Of each lane of the replay, in the order of the devices."""
    lanes: dict[int, list[Span]] = {}
    for event in trace_events(prediction):
        if event["ph"] == "X":
            start = event["ts"] / 1e3
            end = start + event["dur"] / 1e3
            lanes.setdefault(event["pid"], []).append(
                Span(name=event["name"], kind=event["cat"], start_ms=round(start, 6), end_ms=round(end, 6))
            )
    return [lanes[number] for number in sorted(lanes)]


def _thin(spans: Iterable[Span]) -> list[Span]:
    """Neighbours of one kind as one, if there are too many."""
    found = list(spans)
    if len(found) <= _SPANS:
        return found
    size = -(-len(found) // _SPANS)
    thin: list[Span] = []
    for kind, group in groupby(found, key=lambda span: span.kind):
        run = list(group)
        for first in range(0, len(run), size):
            part = run[first : first + size]
            name = part[0].name if len(part) == 1 else f"{part[0].name} … {part[-1].name}"
            start, end = min(s.start_ms for s in part), max(s.end_ms for s in part)
            thin.append(Span(name=name, kind=kind, start_ms=start, end_ms=end))
    return thin
