"""The results of `doctor --gpu`, as tables, one JSON file and one page.

Users can send both files: they have no paths, host names or user names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from markupsafe import Markup

from bitwright.core.display import Summarized, Table, bar_chart
from bitwright.core.files import write_text
from bitwright.core.formatting import json_text, size
from bitwright.reports.page import document

__all__ = ["DeviceFacts", "GpuDiagnosis", "KernelCheck", "Rate", "StepTime"]


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """The device and its software."""

    name: str
    kind: str
    capability: str | None
    processors: int | None
    memory: int | None
    """Bytes."""
    software: dict[str, str]
    engines: dict[str, str]
    """The library that multiplies in each format, or why it is only simulated."""


@dataclass(frozen=True, kw_only=True)
class KernelCheck:
    """A comparison with the CPU."""

    name: str
    error: float | None
    """The largest difference, relative to the largest value."""
    problem: str | None


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A measured operation."""

    what: str
    format: str
    milliseconds: float
    rate: float
    unit: str
    of_roofline: float | None = None
    """The share of what the measured peak and the memory's bandwidth allow."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """A training step."""

    model: str
    format: str
    milliseconds: float
    of_float: float
    peak_bytes: int | None
    notes: list[str]


@dataclass(frozen=True, kw_only=True)
class GpuDiagnosis(Summarized):
    """The result of `diagnose_gpu`."""

    device: DeviceFacts
    checks: list[KernelCheck] = field(default_factory=list)
    rates: list[Rate] = field(default_factory=list)
    steps: list[StepTime] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """What the time limit left out, and what failed, with the reason."""
    seconds: float = 0.0

    def failures(self) -> list[str]:
        """Wrong results."""
        return [f"{check.name}: {check.problem}" for check in self.checks if check.problem is not None]

    def summary(self) -> Iterator[Table | str]:
        """One table for each part."""
        facts = self.device
        rows = [
            ("device", f"{facts.name} ({facts.kind})"),
            ("compute capability", facts.capability),
            ("multiprocessors", facts.processors),
            ("memory", None if facts.memory is None else size(facts.memory)),
            *facts.software.items(),
            *((f"products in {format}", engine) for format, engine in facts.engines.items()),
        ]
        yield Table(["", ""], [row for row in rows if row[1] is not None], title="Device")
        found = [(one.name, one.problem or "correct", _error(one.error)) for one in self.checks]
        yield Table(["result", "compared with the CPU", "#relative error"], found, title="Correctness")
        rates = [
            (
                one.what,
                one.format,
                f"{one.milliseconds:.3f}",
                f"{one.rate:.2f} {one.unit}",
                None if one.of_roofline is None else f"{100 * one.of_roofline:.0f} %",
            )
            for one in self.rates
        ]
        yield Table(["operation", "format", "#ms", "#rate", "#of the roofline"], rates, title="Rates")
        steps = [
            (
                one.model,
                one.format,
                f"{one.milliseconds:.2f}",
                f"{one.of_float:.2f}",
                None if one.peak_bytes is None else size(one.peak_bytes),
            )
            for one in self.steps
        ]
        yield Table(["model", "format", "#ms", "#time of FP32", "#peak memory"], steps, title="Training steps")
        for text in self.skipped:
            yield f"not measured: {text}"
        yield f"{self.seconds:.0f} s"

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {"kind": "bitwright-gpu-doctor", "version": 1, **asdict(self)}

    def save(self, folder: str | Path) -> tuple[Path, Path]:
        """Write `gpu-doctor.json` and `gpu-doctor.html`."""
        text, parts = json_text(self.to_dict()), Markup()
        for part in self.summary():
            if isinstance(part, str):
                parts += Markup("<p>{}</p>").format(part)
            elif part.rows:
                parts += Markup("<section><h2>{}</h2>{}</section>").format(part.title, part.to_html())
        bars = [(f"{one.model}, {one.format}", f"{one.milliseconds:.2f} ms", one.milliseconds) for one in self.steps]
        if bars:
            parts += Markup("<section><h2>Steps</h2>{}</section>").format(
                Markup(bar_chart(bars, label="Milliseconds of a training step")._repr_html_())
            )
        title = f"GPU doctor: {self.device.name}"
        body = Markup("<header><h1>{}</h1></header>").format(title) + parts
        page = document(title, body, data=text, nav=(), scripts=())
        paths = Path(folder) / "gpu-doctor.json", Path(folder) / "gpu-doctor.html"
        return write_text(paths[0], text + "\n"), write_text(paths[1], page)


def _error(value: float | None) -> str | None:
    return None if value is None else f"{value:.1e}"
