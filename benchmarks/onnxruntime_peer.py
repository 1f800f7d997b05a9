"""Our INT8 artefact against ONNX Runtime's own `quantize_static`: same model, same calibration data, same runtime.

    python benchmarks/onnxruntime_peer.py [--runs 200] [--models resnet20-cifar10 ...]

Needs real data (BITWRIGHT_DATA, or ../shared/data beside the repository). Latencies are interleaved medians of one run.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from common import environment, save
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

import bitwright as bw

# name → options of quantize_static; the first is what a user gets without asking
PEERS: dict[str, dict[str, Any]] = {
    "ort default": {},
    "ort u8 activations": {"activation_type": QuantType.QUInt8, "per_channel": True},
    "ort u8, reduced range": {
        "activation_type": QuantType.QUInt8,
        "per_channel": True,
        "reduce_range": True,
    },
}


class Batches(CalibrationDataReader):
    """The workload's calibration batches for the peer."""

    def __init__(self, name: str, batches: list[torch.Tensor]) -> None:
        self.feed: Iterator[dict[str, np.ndarray]] = iter([{name: batch.numpy()} for batch in batches])

    def get_next(self) -> dict[str, np.ndarray] | None:
        """One batch, or None at the end."""
        return next(self.feed, None)


def compare(name: str, runs: int) -> dict[str, Any]:
    """Build all artefacts of one model, measure accuracy and latency."""
    workload = bw.load_workload(name)
    assert workload.calibration is not None
    batches = list(workload.calibration())
    with tempfile.TemporaryDirectory() as folder:
        files = {"float": bw.export_float(workload.model, Path(folder) / "float.onnx", workload.inputs)}
        input_name = bw.open_runtime("onnxruntime", files["float"]).inputs[0]
        prepared = Path(folder) / "prepared.onnx"
        quant_pre_process(str(files["float"]), str(prepared))
        for peer, options in PEERS.items():
            files[peer] = Path(folder) / f"{peer}.onnx"
            quantize_static(
                str(prepared), str(files[peer]), Batches(input_name, batches), quant_format=QuantFormat.QDQ, **options
            )
        quantized = bw.quantize(workload.model, batches, example=workload.inputs)
        files["bitwright"] = quantized.export(Path(folder) / "bitwright.onnx").path
        rows: dict[str, Any] = {
            label: {"bytes": path.stat().st_size, "top1": _accuracy(workload, path)} for label, path in files.items()
        }
        example = batches[0]
        for batch, threads in ((1, 1), (1, 2), (len(example), 1), (len(example), 2)):
            sessions = {label: bw.open_runtime("onnxruntime", path, threads=threads) for label, path in files.items()}
            feed = {input_name: example[:batch].numpy()}
            times = bw.measure_latency(
                {label: partial(session.run, feed) for label, session in sessions.items()},
                runs=max(30, runs // batch),
            )
            for label, latency in times.items():
                rows[label][f"ms batch {batch} threads {threads}"] = round(latency.median_ms, 4)
    return rows


def _accuracy(workload: bw.Workload, path: Path) -> float:
    return bw.evaluate(workload, bw.open_runtime("onnxruntime", path, threads=2))["top1"]


def table(name: str, rows: dict[str, Any]) -> str:
    """A Markdown table; latencies also as ratio to ours."""
    keys = [key for key in rows["bitwright"] if key.startswith("ms ")]
    lines = [f"### {name}", "", "| artefact | top-1 % | bytes | " + " | ".join(keys) + " |"]
    lines.append("|---" * (3 + len(keys)) + "|")
    for label, row in rows.items():
        cells = [f"{row[key]:.2f} ({row[key] / rows['bitwright'][key]:.2f}× ours)" for key in keys]
        lines.append(f"| {label} | {row['top1']:.2f} | {row['bytes']:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run and keep the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--models", nargs="*", default=["resnet20-cifar10", "efficientnet-lite0-imagenet"])
    options = parser.parse_args()
    os.environ.setdefault("BITWRIGHT_DATA", str(Path(__file__).parents[2] / "shared" / "data"))
    torch.manual_seed(0)
    results = {name: compare(name, options.runs) for name in options.models}
    facts = environment(onnxruntime=onnxruntime.__version__, runs=options.runs)
    text = "\n\n".join(table(name, rows) for name, rows in results.items())
    save("onnxruntime_peer", {"environment": facts, "results": results}, "# INT8 beside quantize_static\n\n" + text)


if __name__ == "__main__":
    main()
