"""INT8 latency and accuracy of our artefact beside the peers', on the same runtime, in turns, with one thread.

    python benchmarks/peer_artefacts.py [--runs 300] [--models resnet20-cifar10 ...] [--no-accuracy]

Needs real data (BITWRIGHT_DATA) and the extra `bench`. Our artefact is opened twice on each runtime: the ratio of these
two is the noise of the run. Bar: at most 1.0 times the best peer (within that noise), and accuracy no lower.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import environment, save
from peers import PEERS, quietly

import bitwright as bw

ON = {
    "onnxruntime": ["bitwright", "onnxruntime", "onnxruntime u8", "nncf onnx"],
    "openvino": ["bitwright openvino", "nncf openvino", "nncf onnx", "onnxruntime u8"],
}


def compare(name: str, runs: int, accuracy: bool, calibration: int | None) -> dict[str, Any]:
    workload = bw.load_workload(name)
    assert workload.calibration is not None
    batches = list(workload.calibration())[:calibration]
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        files: dict[str, Path] = {}
        for peer in dict.fromkeys(peer for peers in ON.values() for peer in peers):
            place = Path(folder) / peer.replace(" ", "-")
            place.mkdir()
            model = bw.load_workload(name).model  # each quantizes a fresh model
            files[peer] = PEERS[peer](model, workload.inputs, batches, place)
        plain = bw.export_float(workload.model, Path(folder) / "float.onnx", workload.inputs)
        for runtime, peers in ON.items():
            paths = {"float": plain, **{peer: files[peer] for peer in peers}, "ours again": files[peers[0]]}
            results[runtime] = _measure(workload, runtime, paths, batches[0][:1], runs, accuracy)
    return results


def _measure(
    workload: bw.Workload, runtime: str, paths: dict[str, Path], example: torch.Tensor, runs: int, accuracy: bool
) -> dict[str, Any]:
    sessions = {label: bw.open_runtime(runtime, path, threads=1) for label, path in paths.items()}
    times = bw.measure_latency(
        {label: partial(session.run, session.feed(example)) for label, session in sessions.items()}, runs=runs
    )
    rows = {
        label: {
            "ms": round(times[label].median_ms, 4),
            "p10": round(times[label].p10_ms, 4),
            "p90": round(times[label].p90_ms, 4),
            "ran as": session.executed(),
            **({"top1": session.accuracy(workload)["top1"]} if accuracy and label != "ours again" else {}),
        }
        for label, session in sessions.items()
    }
    ours, *others = [label for label in paths if label not in ("float", "ours again")]
    best = min(others, key=lambda label: rows[label]["ms"])
    ratio, noise = rows[ours]["ms"] / rows[best]["ms"], abs(rows["ours again"]["ms"] / rows[ours]["ms"] - 1)
    return {
        "rows": rows,
        "best peer": best,
        "ratio": round(ratio, 3),
        "noise": round(noise, 3),
        "met": bool(ratio <= 1 + noise),
    }


def table(name: str, results: dict[str, Any]) -> str:
    lines = []
    for runtime, found in results.items():
        lines += [f"### {name} on {runtime}, batch 1, one thread", "", "| artefact | ms | 10–90 % | top-1 % | ran as |"]
        lines.append("|---" * 5 + "|")
        for label, row in found["rows"].items():
            top1 = f"{row['top1']:.2f}" if "top1" in row else ""
            lines.append(
                f"| {label} | {row['ms']:.3f} | {row['p10']:.3f}–{row['p90']:.3f} | {top1} | {row['ran as']} |"
            )
        verdict = "met" if found["met"] else "missed"
        lines += ["", f"Ours / best peer ({found['best peer']}): {found['ratio']} ± {found['noise']}: {verdict}.", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--models", nargs="*", default=["resnet20-cifar10", "efficientnet-lite0-imagenet"])
    parser.add_argument("--calibration", type=int, default=None, help="at most so many batches")
    parser.add_argument("--no-accuracy", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("BITWRIGHT_DATA", str(Path(__file__).parents[2] / "shared" / "data"))
    quietly()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    results = {
        name: compare(name, options.runs, not options.no_accuracy, options.calibration) for name in options.models
    }
    text = "\n".join(table(name, found) for name, found in results.items())
    save(
        "peer_artefacts",
        {"environment": environment(runs=options.runs), "results": results},
        f"# INT8 artefacts\n\n{text}",
    )


if __name__ == "__main__":
    main()
