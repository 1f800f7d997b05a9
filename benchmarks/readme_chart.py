"""Draw `docs/pictures/results.svg`, the chart of the README, from `results/*.json`.

python benchmarks/readme_chart.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
CHART = Path(__file__).parents[1] / "docs" / "pictures" / "results.svg"

_WIDTH, _LEFT, _BAR, _GAP = 720, 300, 16, 6
_NOTE = "Ratios; shorter bars are better. Drawn from benchmarks/results by benchmarks/readme_chart.py."
_DARK = (
    "@media (prefers-color-scheme:dark){.text{fill:#e5e7eb}.soft{fill:#a3abb8}.peer{fill:#6b7280}.ours{fill:#4fd1bd}"
    ".one{stroke:#a3abb8}}"
)
_STYLE = (
    ".text{fill:#1f2937;font-size:13px}.soft{fill:#6b7280;font-size:12px}.head{font-weight:600}"
    ".ours{fill:#0f766e}.peer{fill:#a3aebf}.one{stroke:#6b7280;stroke-dasharray:3 3}"
)


@dataclass(frozen=True, kw_only=True)
class Bar:
    name: str
    value: float
    ours: bool


@dataclass(frozen=True, kw_only=True)
class Panel:
    title: str
    bars: list[Bar]


def results(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["results"]
    return data


def panels() -> Iterator[Panel]:
    yield Panel(title="INT8 latency, batch 1, relative to float", bars=list(_latencies()))
    yield Panel(title="CPU time of plain calibration, relative to the fastest peer", bars=list(_calibration()))
    yield Panel(title="Step of quantization-aware training, ResNet-20, relative to float", bars=list(_steps()))


def _latencies() -> Iterator[Bar]:
    networks = {"resnet20-cifar10": "ResNet-20", "efficientnet-lite0-imagenet": "EfficientNet-Lite0"}
    runtimes = {"onnxruntime": ("ONNX Runtime", "bitwright"), "openvino": ("OpenVINO", "bitwright openvino")}
    for network, short in networks.items():
        for runtime, (title, ours) in runtimes.items():
            found = results("peer_artefacts")[network][runtime]
            rows, peer = found["rows"], found["best peer"]
            yield Bar(name=f"{short}, {title}: Bitwright", value=rows[ours]["ms"] / rows["float"]["ms"], ours=True)
            yield Bar(name=f"fastest peer ({peer})", value=rows[peer]["ms"] / rows["float"]["ms"], ours=False)


def _calibration() -> Iterator[Bar]:
    networks = {"resnet20": "ResNet-20", "efficientnet-lite0": "EfficientNet-Lite0", "bert-base": "BERT-base"}
    for network, short in networks.items():
        seconds = {
            tool: found["phases"]["quantize"]
            for tool, found in results("ptq_time")[network].items()
            if "phases" in found
        }
        best = min(value for tool, value in seconds.items() if tool != "bitwright")
        yield Bar(name=f"{short}: Bitwright", value=seconds["bitwright"] / best, ours=True)


def _steps() -> Iterator[Bar]:
    found = results("step_time")
    ours = {"onnxruntime, compiled arithmetic": "Bitwright, compiled arithmetic", "onnxruntime": "Bitwright"}
    for key, title in ours.items():
        yield Bar(name=title, value=found[key]["ratio"], ours=True)
    for peer, title in {"torchao": "torchao", "brevitas": "Brevitas", "nncf": "NNCF"}.items():
        yield Bar(name=title, value=found[peer]["ratio"], ours=False)


def draw() -> str:
    """The chart as SVG. All panels share one scale, and a dashed line marks 1."""
    all_panels = list(panels())
    most = max(bar.value for panel in all_panels for bar in panel.bars)
    scale = (_WIDTH - _LEFT - 60) / most
    parts: list[str] = []
    y = 8
    for panel in all_panels:
        y += 20
        parts.append(f'<text class="text head" x="8" y="{y}">{escape(panel.title)}</text>')
        y += 10
        top = y
        for bar in panel.bars:
            middle, end = y + _BAR - 4, _LEFT + bar.value * scale
            parts += [
                f'<text class="{"text" if bar.ours else "soft"}" x="{_LEFT - 8}" y="{middle}" text-anchor="end">'
                f"{escape(bar.name)}</text>",
                f'<rect class="{"ours" if bar.ours else "peer"}" x="{_LEFT}" y="{y}" width="{bar.value * scale:.1f}" '
                f'height="{_BAR}" rx="2"/>',
                f'<text class="text" x="{end + 6:.1f}" y="{middle}">{bar.value:.2f}×</text>',
            ]
            y += _BAR + _GAP
        one = _LEFT + scale
        parts.append(f'<line class="one" x1="{one:.1f}" y1="{top - 3}" x2="{one:.1f}" y2="{y - _GAP + 3}"/>')
        y += 8
    y += 16
    parts.append(f'<text class="soft" x="8" y="{y}">{escape(_NOTE)}</text>')
    height = y + 10
    titles = "; ".join(panel.title for panel in all_panels)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
            f'height="{height}" role="img" font-family="system-ui,sans-serif">',
            "<title>Measured results</title>",
            f"<desc>{escape(titles)}</desc>",
            f"<style>{_STYLE}{_DARK}</style>",
            *parts,
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    CHART.write_text(draw(), encoding="utf-8")
    print(CHART.relative_to(CHART.parents[2]))
