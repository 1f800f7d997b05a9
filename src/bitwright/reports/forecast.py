"""The result of `bitwright predict` in a record: the step of each device, predicted and measured."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from pydantic import Field

from bitwright.cluster import Prediction
from bitwright.cluster.compare import StepComparison, TimePair
from bitwright.cluster.prediction import trace_events
from bitwright.core.documents import ResultModel

_DEVICES = 16  # kinds of devices with a timeline; exact mode can have a thousand
_SPANS = 1200  # per device; a screen can't show more


class Span(ResultModel):
    """One operator or collective on the time axis of a device."""

    name: str
    kind: str = Field(description="forward, backward, tail, or collective.")
    start_ms: float
    end_ms: float


class ForecastDevice(ResultModel):
    """One kind of device, with the number of devices of this kind."""

    name: str
    count: int
    computing_ms: float
    busy: float = Field(description="Share of the step.")
    communicating: float
    waiting: float
    phases_ms: dict[str, float] = Field(description="Predicted, in the order of a step.")
    memory_peak: int | None = Field(default=None, description="Bytes.")
    memory_cause: str | None = None
    memory_process: int | None = Field(default=None, description="Bytes of the whole process, which must fit.")
    memory_limit: int | None = Field(default=None, description="Bytes that the device has.")
    memory_reserve: float = Field(
        default=0.0,
        description="Share of the limit that stays free, because predictions have an error of some percent.",
    )
    stood_in: int = Field(default=0, description="Operators that were not measured in their format.")
    spans: tuple[Span, ...] = ()


class PredictedAndMeasured(ResultModel):
    """Predicted and measured time of a step, a phase or a kind of operators."""

    name: str
    predicted_ms: float
    measured_ms: float


class MeasuredSteps(ResultModel):
    """Measured steps of the first device."""

    steps: int
    step: PredictedAndMeasured
    phases: tuple[PredictedAndMeasured, ...]
    groups: tuple[PredictedAndMeasured, ...] = Field(description="Operators by kind, and casts.")
    drift: float | None = Field(
        description="Time of a fixed workload now, relative to its time when the device was profiled."
    )


class Forecast(ResultModel):
    """One plan on one device, or on a cluster."""

    name: str = Field(description="The predicted precision or plan; a later forecast of this name replaces it.")
    step_ms: float
    samples_per_second: float
    critical: tuple[str, ...]
    devices: tuple[ForecastDevice, ...]
    left_out: int = Field(default=0, description="Devices without a row, because there are too many.")
    measured: MeasuredSteps | None = None


def forecast(prediction: Prediction, name: str, comparison: StepComparison | None = None) -> Forecast:
    """Make the forecast of a prediction."""
    spans = _spans(prediction)
    return Forecast(
        name=name,
        step_ms=1e3 * prediction.seconds,
        samples_per_second=prediction.samples_per_second,
        critical=prediction.critical,
        left_out=max(0, len(prediction.devices) - _DEVICES),
        devices=tuple(
            ForecastDevice(
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
        else MeasuredSteps(
            steps=comparison.steps,
            step=_both(comparison.step),
            phases=tuple(map(_both, comparison.phases)),
            groups=tuple(map(_both, comparison.groups)),
            drift=comparison.drift,
        ),
    )


def _both(pair: TimePair) -> PredictedAndMeasured:
    return PredictedAndMeasured(name=pair.name, predicted_ms=1e3 * pair.predicted, measured_ms=1e3 * pair.measured)


def _spans(prediction: Prediction) -> list[list[Span]]:
    """The spans of each device, in the order of the devices."""
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
    """Merge neighbouring spans of one kind if there are too many."""
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
