"""Read all published files of LPOT, MQBench and QSync, and traces: how many are accepted, noted or rejected.

    BITWRIGHT_DATA=FOLDER python benchmarks/peer_files.py [--folder FOLDER]

The folder contains lpot/, mqbench/zoo/, mqbench/application/, qsync/ and traces/, or peers/ with them. Bar: at least
95 % of LPOT's quantization files, all files of MQBench and all mappers are accepted; every trace is read or rejected
with a reason; nothing ends in a traceback. Accepted means that every key is known and valid. It doesn't mean that the
file was run. For the zoo, the plan of the whole network is made, too, as `train` does before its first iteration.
Traces: the steady step is replayed from the trace alone. Traces of ResNet-50 with 32 images are also matched with our
ResNet-50, and the step is predicted from the profile that this gives. Bar: 5 %.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from common import environment, save

from bitwright.backends import backend
from bitwright.bench.grid import GridConfig
from bitwright.bench.grid_row import plan_of
from bitwright.cluster import predict_step
from bitwright.core.documents import read_yaml
from bitwright.core.errors import BitwrightError, Problem
from bitwright.core.registry import NETWORKS
from bitwright.graph import Graph, capture
from bitwright.importers.lpot import read_lpot, tune_settings
from bitwright.importers.mqbench import load_mqbench, mqbench_settings
from bitwright.importers.qsync import load_mapper, summarize_mapper
from bitwright.importers.trace import TraceMatch, match_trace
from bitwright.importers.trace_summary import TraceSummary, summarize_trace
from bitwright.plan import Plan
from bitwright.profiling import StepGraph, record_step
from bitwright.zoo import resnet50

Notes = tuple[Problem, ...]
TRACES: dict[str, TraceSummary] = {}
PREDICTED: dict[str, float] = {}
"""The predicted step in seconds, where a trace is that of our ResNet-50."""
BAR = 0.05
OTHER_TASKS = {"pruning", "distillation", "auto_distillation", "nas"}


def _lpot(file: Path) -> Notes:
    found = read_lpot(read_yaml(file, what="the file"), where=file.name)
    try:
        tune_settings(found.config)
    except BitwrightError as error:
        return (*found.notes, *error.problems)
    return found.notes


def _mqbench(file: Path) -> Notes:
    found = load_mqbench(file)
    mqbench_settings(found.config)
    return found.notes


def _zoo(file: Path) -> Notes:
    """Read the file and make the plan of its network, as `train` does before the first iteration."""
    found = load_mqbench(file)
    (task,) = GridConfig.load(file, data=file.parent).tasks()
    plan_of(task, backend(task.backend), _graph(found.config.model.type), file.name)
    return found.notes


@cache
def _graph(name: str) -> Graph:
    """The graph of a network of the zoo, on small images."""
    return capture(NETWORKS.get(name)(image_size=64).eval(), (torch.zeros(1, 3, 64, 64),))


def _qsync(file: Path) -> Notes:
    summarize_mapper(load_mapper(file))
    return ()


def _trace(file: Path) -> Notes:
    TRACES[file.name] = summarize_trace(file)
    match = _matched(file)
    if match is not None:
        PREDICTED[file.name] = predict_step(_resnet50_step(), Plan(), match.profile).seconds
    return ()


def _matched(file: Path) -> TraceMatch | None:
    """The trace as a step of our ResNet-50; None if it is one of another model."""
    try:
        match = match_trace(file, _resnet50_step())
    except BitwrightError:
        return None
    return match if match.matched > 0.9 * match.operators and match.unmatched_share < 0.1 else None


@cache
def _resnet50_step() -> StepGraph:
    batch = torch.zeros(32, 3, 224, 224), torch.zeros(32, dtype=torch.int64)
    return record_step(resnet50(), batch, torch.nn.functional.cross_entropy)


SYSTEMS: dict[str, tuple[str, str, Callable[[Path], Notes]]] = {
    "LPOT": ("lpot", "*.yaml", _lpot),
    "MQBench zoo": ("mqbench/zoo", "*.yaml", _zoo),
    "MQBench toolkit": ("mqbench/application", "*.yaml", _mqbench),
    "QSync mappers": ("qsync", "*.npy", _qsync),
    "traces": ("traces", "*.json*", _trace),
}


@dataclass
class Row:
    """The files of one system."""

    files: int = 0
    accepted: int = 0
    noted: int = 0
    """Accepted with keys that can't change the result."""
    cannot_run: int = 0
    """Accepted with settings that `tune` can't apply; only LPOT's files are checked."""
    other_tasks: int = 0
    """Rejected since they prune or distil."""
    rejected: int = 0
    tracebacks: int = 0
    reasons: dict[str, str] = field(default_factory=dict)


def read_system(folder: Path, pattern: str, read: Callable[[Path], Notes]) -> tuple[Row, Counter[str]]:
    row, cannot = Row(), Counter[str]()
    for file in sorted(folder.glob(pattern)):
        row.files += 1
        try:
            notes = read(file)
        except BitwrightError as error:
            if {problem.where for problem in error.problems} <= OTHER_TASKS:
                row.other_tasks += 1
            else:
                row.rejected += 1
            row.reasons[file.name] = "; ".join(f"{problem.where}: {problem.what}" for problem in error.problems)
            row.reasons[file.name] = row.reasons[file.name].replace(f"{folder}/", "")
        except Exception as error:  # a traceback is a result, too
            row.tracebacks += 1
            row.reasons[file.name] = f"{type(error).__name__}: {error}"
        else:
            row.accepted += 1
            row.noted += any(note.code == "no-effect" for note in notes)
            missing = [note for note in notes if note.code == "cannot-run"]
            row.cannot_run += bool(missing)
            cannot.update(f"{note.where}: {note.what} ({note.value})" for note in missing)
    return row, cannot


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=os.environ.get("BITWRIGHT_DATA"))
    given = parser.parse_args().folder
    if given is None:
        parser.error("set BITWRIGHT_DATA or --folder")
    root = given / "peers" if (given / "peers").is_dir() else given
    rows: dict[str, Row] = {}
    cannot: dict[str, Counter[str]] = {}
    for name, (place, pattern, read) in SYSTEMS.items():
        rows[name], cannot[name] = read_system(root / place, pattern, read)
    data: dict[str, Any] = {
        "environment": environment(),
        "systems": {name: asdict(row) for name, row in rows.items()},
        "traces": {name: _trace_row(name, summary) for name, summary in TRACES.items()},
        "cannot_run": {name: dict(found.most_common()) for name, found in cannot.items() if found},
    }
    save("peer_files", data, _markdown(rows, cannot))
    wrong = [name for name, found in PREDICTED.items() if abs(found / (TRACES[name].step_seconds or found) - 1) > BAR]
    wrong += [name for name, summary in TRACES.items() if summary.error is not None and abs(summary.error) > BAR]
    return int(bool(wrong) or any(row.tracebacks for row in rows.values()))


def _trace_row(name: str, summary: TraceSummary) -> dict[str, Any]:
    """Steps in milliseconds."""
    replay, measured, error = summary.replay, summary.step_seconds, summary.error
    predicted = PREDICTED.get(name)
    return {
        "device": summary.device,
        "steady steps": f"{len(summary.steady)} of {len(summary.steps)}",
        "measured": "–" if measured is None else f"{1e3 * measured:.1f}",
        "replayed": "–" if replay is None else f"{1e3 * replay.seconds:.1f}",
        "error": "–" if error is None else f"{100 * error:+.1f} %",
        "predicted": "–" if predicted is None else f"{1e3 * predicted:.1f}",
        "its error": "–" if predicted is None or not measured else f"{100 * (predicted / measured - 1):+.1f} %",
        "limited by": "–" if replay is None else replay.bound,
    }


def _markdown(rows: dict[str, Row], cannot: dict[str, Counter[str]]) -> str:
    lines = [
        "# Published files of other systems",
        "",
        "Accepted: every key is known and valid; the file was not run. Noted: of these, with keys that can't change",
        "the result. Can't run: of these, with settings that `bitwright tune` can't apply (checked for LPOT only).",
        "Other tasks: files that prune or distil.",
        "",
        "| system | files | accepted | noted | can't run | other tasks | rejected | tracebacks |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        cannot_run = row.cannot_run if name == "LPOT" else "–"
        cells = (row.files, row.accepted, row.noted, cannot_run, row.other_tasks, row.rejected, row.tracebacks)
        lines.append(f"| {name} | {' | '.join(map(str, cells))} |")
    if TRACES:
        found = {name: _trace_row(name, summary) for name, summary in TRACES.items()}
        heads = list(next(iter(found.values())))
        words = "Replayed: from the trace alone. Predicted: from the profile that the trace gives our ResNet-50."
        lines += ["", "## Steady steps of traces (ms)", "", words, "", f"| trace | {' | '.join(heads)} |"]
        lines.append("|---" * (1 + len(heads)) + "|")
        lines += [f"| {name} | {' | '.join(map(str, cells.values()))} |" for name, cells in found.items()]
    if any(row.reasons for row in rows.values()):
        lines += ["", "## Not accepted", "", "| file | reason |", "|---|---|"]
        lines += [f"| {file} | {reason} |" for row in rows.values() for file, reason in row.reasons.items()]
    if any(cannot.values()):
        lines += ["", "## Settings that can't run", "", "| setting | files |", "|---|---|"]
        lines += [f"| {text} | {count} |" for found in cannot.values() for text, count in found.most_common()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
