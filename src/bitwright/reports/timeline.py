"""Timelines of a predicted training step, one for each kind of device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from markupsafe import Markup

from bitwright.core import charts
from bitwright.reports.forecast import Forecast, ForecastDevice


def timelines(found: Forecast) -> Iterator[tuple[str, Markup]]:
    """A title and a drawing for each kind of device; devices without times are left out."""
    for index, device in enumerate(found.devices):
        drawing = _timeline(found, device, first=index == 0)
        if drawing is not None:
            yield _title(device), drawing


def _title(device: ForecastDevice) -> str:
    return device.name if device.count == 1 else f"{device.name} × {device.count}"


def _timeline(found: Forecast, device: ForecastDevice, *, first: bool) -> Markup | None:
    """Predicted phases, operators and collectives above the measured phases, on one time axis."""
    predicted = phases(device)
    lanes: list[tuple[str, list[charts.Bar]]] = [("predicted", predicted)]
    compute = [s for s in device.spans if s.kind != "collective"]
    if compute:
        lanes.append(
            (
                "operators",
                [charts.Bar(start=s.start_ms, end=s.end_ms, name=s.name, kind=f"op {s.kind}") for s in compute],
            )
        )
    sent = [s for s in device.spans if s.kind == "collective"]
    if sent:
        lanes.append(
            ("collectives", [charts.Bar(start=s.start_ms, end=s.end_ms, name=s.name, kind="collective") for s in sent])
        )
    if found.measured is not None and first:
        lanes.append(("measured", _stacked(_in_order((b.name, b.measured_ms) for b in found.measured.phases))))
    end = max((bar.end for _, bars in lanes for bar in bars), default=0.0)
    if end <= 0:
        return None
    return charts.lanes(lanes, end=end, unit="ms", label=f"Timeline of {_title(device)}")


def phases(device: ForecastDevice) -> list[charts.Bar]:
    """The phases on the time axis of the operators, with the wait between backward and optimizer."""
    hull: dict[str, tuple[float, float]] = {}
    for span in device.spans:
        start, end = hull.get(span.kind, (span.start_ms, span.end_ms))
        hull[span.kind] = min(start, span.start_ms), max(end, span.end_ms)
    times = device.phases_ms
    if not {"forward", "backward", "tail"} <= set(hull):
        return _stacked(_in_order(times.items()))
    (begins, forward), (_, backward), (tail, end) = (hull[kind] for kind in ("forward", "backward", "tail"))
    loss = min(forward + times.get("loss", 0.0), backward)
    # With gradient accumulation, the operators are those of the last batch.
    before = "earlier batches" if begins > 1.5 * times.get("other", 0.0) else "other"
    marks = [("other", before, 0.0, begins), ("forward", "forward", begins, forward), ("loss", "loss", forward, loss)]
    marks += [("backward", "backward", loss, backward), ("wait", "waits", backward, tail)]
    at = tail
    for name in ("clip", "optimizer"):
        last = end if name == "optimizer" else min(at + times.get(name, 0.0), end)
        marks.append((name, name, at, last))
        at = last
    least = end / 1e4  # rounding
    return [
        charts.Bar(start=start, end=stop, name=name, kind=f"phase {kind}")
        for kind, name, start, stop in marks
        if stop - start > least
    ]


def _in_order(items: Iterable[tuple[str, float]]) -> list[tuple[str, float]]:
    """Time outside of all phases comes first, as in the prediction."""
    return sorted(items, key=lambda item: item[0] != "other")


def _stacked(items: Iterable[tuple[str, float]]) -> list[charts.Bar]:
    bars: list[charts.Bar] = []
    at = 0.0
    for name, length in items:
        if length > 0:
            bars.append(charts.Bar(start=at, end=at + length, name=name, kind=f"phase {name}"))
        at += length
    return bars
