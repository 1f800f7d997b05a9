"""Wall time and peak memory of plain-calibration PTQ, from a torch model to a file, ours beside the peers'.

    python benchmarks/ptq_time.py [--repeats 3] [--models resnet20 ...] [--tools bitwright ...] [--batches 8]

Each measurement is a fresh process, and is kept in a folder (`--folder`): a benchmark that was stopped goes on. Tools
take turns. Imports, the model and the data are loaded before the clock
starts, and their garbage is collected. `quantize` is plain calibration by itself: prepare, calibrate, convert, from the
form that a tool quantizes (ONNX, an exported program; ours is the torch model) to the quantized model. `whole` has also
what it takes to get there and to write a file (torch.onnx, torch.export), ours as well as theirs. CPU seconds are
compared: other processes disturb them least. Bar: plain calibration in at most 0.5 times the best of them, and accuracy
no lower. The encoder has random weights: its accuracy is how often it chooses the class that the float model chooses.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

TOOLS = ["bitwright", "onnxruntime", "nncf onnx", "nncf openvino", "torchao"]
_FRESH = 8  # batches for the encoder's accuracy
MODELS = {"resnet20": 8, "efficientnet-lite0": 4, "bert-base": 4}
"""With how many batches they are calibrated: of 64 and 25 images, and of 8 sequences of 128 tokens."""


def _bert(batches: int) -> tuple[Any, Any, list[Any], Any]:
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(num_labels=100, attn_implementation="eager")).eval()
    model.config.return_dict = False
    data = [{"input_ids": torch.randint(0, 30000, (8, 128))} for _ in range(batches)]
    return model, data[0], data, None


def _zoo(name: str, batches: int) -> tuple[Any, Any, list[Any], Any]:
    import bitwright as bw

    workload = bw.load_workload(name)
    assert workload.calibration is not None
    return workload.model, workload.inputs, list(workload.calibration())[:batches], workload


def _load(model: str, batches: int) -> tuple[Any, Any, list[Any], Any]:
    if model == "bert-base":
        return _bert(batches)
    return _zoo({"resnet20": "resnet20-cifar10", "efficientnet-lite0": "efficientnet-lite0-imagenet"}[model], batches)


def one(tool: str, model: str, batches: int, accuracy: bool) -> dict[str, Any]:
    """In a process of its own."""
    import torch
    from peers import LAPS, PEERS, quietly

    import bitwright as bw
    import bitwright.ptq.quantize

    quietly()
    torch.set_num_threads(1)
    for package in {"nncf onnx": ["nncf", "onnx"], "nncf openvino": ["nncf", "openvino"]}.get(tool, [tool]):
        __import__(package)
    import onnxruntime  # noqa: F401
    import torch.onnx

    net, example, data, workload = _load(model, batches)
    fresh: list[Any] = []
    if accuracy and workload is None:
        fresh = [{"input_ids": torch.randint(0, 30000, (8, 128))} for _ in range(_FRESH)]
        with torch.no_grad():
            chosen = [net(**batch)[0].argmax(1) for batch in fresh]
    gc.collect()  # what imports and loading have left behind isn't the tool's
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory() as folder:
        start, cpu = time.perf_counter(), time.process_time()
        path = PEERS[tool](net, example, data, Path(folder))
        seconds = time.perf_counter() - start
        burnt = time.process_time() - cpu
        spent, at = {}, cpu
        for name, _, clock in LAPS:
            spent[name], at = clock - at, clock
        result: dict[str, Any] = {
            "phases": spent,
            "seconds": seconds,
            "cpu_seconds": burnt,
            "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "before_mb": before / 1024,
            "bytes": path.stat().st_size,
        }
        if tool == "bitwright":  # what no way of observing can go below
            result["forward"] = _forward(model, batches)
        if accuracy and path.suffix != ".pt2":
            runtime = bw.open_runtime("openvino" if path.suffix == ".xml" else "onnxruntime", path, threads=1)
            if workload is not None:
                result["top1"] = runtime.accuracy(workload)["top1"]
            else:
                same = [(runtime(**batch).argmax(1) == then) for batch, then in zip(fresh, chosen, strict=True)]
                result["top1"] = 100 * float(torch.cat(same).float().mean())
    return result


def _forward(model: str, batches: int) -> float:
    """CPU seconds of the float model by itself on the same batches."""
    import torch

    from bitwright.workload import call

    net, example, data, _ = _load(model, batches)
    with torch.no_grad():
        call(net.eval(), example)
        start = time.process_time()
        for batch in data:
            call(net, batch)
        return time.process_time() - start


def _fresh(tool: str, model: str, batches: int, accuracy: bool) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", tool, model, "--batches", str(batches)]
    ran = subprocess.run(command + ["--accuracy"] * accuracy, capture_output=True, text=True, check=False)
    if ran.returncode:
        return {"error": (ran.stderr.strip().splitlines() or ["?"])[-1][:300]}
    return dict(json.loads(ran.stdout.strip().splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batches", type=int, help="default: 8, 4 and 4")
    parser.add_argument("--folder", type=Path, default=Path("ptq-time-rows"))
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--tools", nargs="*", default=TOOLS)
    parser.add_argument("--accuracy", action="store_true", help="evaluate the first repeat's files")
    parser.add_argument("--kept", action="store_true", help="measure nothing: the tables of what is in the folder")
    parser.add_argument("--one", nargs=2, metavar=("TOOL", "MODEL"))
    options = parser.parse_args()
    os.environ.setdefault("BITWRIGHT_DATA", str(Path(__file__).parents[2] / "shared" / "data"))
    if options.one:
        tool, model = options.one
        print(json.dumps(one(tool, model, options.batches or MODELS[model], options.accuracy)))
        return
    from common import environment, save

    from bitwright.core.files import write_text

    options.folder.mkdir(parents=True, exist_ok=True)

    results: dict[str, Any] = {}
    for model in options.models:
        batches = options.batches or MODELS[model]
        runs: dict[str, list[dict[str, Any]]] = {tool: [] for tool in options.tools}
        for repeat in range(options.repeats):
            turned = options.tools[repeat % len(options.tools) :] + options.tools[: repeat % len(options.tools)]
            for tool in turned:
                kept = options.folder / f"{model} {tool} {batches} {repeat}.json"
                if not kept.is_file() and options.kept:
                    continue
                if not kept.is_file():
                    row = _fresh(tool, model, batches, options.accuracy and repeat == 0)
                    write_text(kept, json.dumps(row, indent=1) + "\n")
                    print(kept.stem, row, flush=True)
                runs[tool].append(json.loads(kept.read_text()))
        results[model] = {tool: _summary(found) for tool, found in runs.items() if found}
    text = "\n\n".join(table(model, rows) for model, rows in results.items())
    facts = environment(repeats=options.repeats, batches={model: options.batches or MODELS[model] for model in results})
    save("ptq_time", {"environment": facts, "results": results}, "# Plain-calibration PTQ: time and memory\n\n" + text)


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    sound = [run for run in runs if "error" not in run]
    if not sound:
        return {"error": runs[0]["error"]}
    times = [run["seconds"] for run in sound]
    return {
        "runs": len(sound),
        "seconds": round(median(times), 3),
        "cpu_seconds": round(median(run["cpu_seconds"] for run in sound), 3),
        "phases": {
            name: round(median(run["phases"].get(name, 0.0) for run in sound), 3)
            for name in ("trace", "quantize", "write")
        },
        "fastest": round(min(times), 3),
        "slowest": round(max(times), 3),
        "peak_mb": round(median(run["peak_mb"] for run in sound)),
        "before_mb": round(median(run["before_mb"] for run in sound)),
        "bytes": sound[0]["bytes"],
        **({"top1": sound[0]["top1"]} if "top1" in sound[0] else {}),
        **({"forward": round(median(r["forward"] for r in sound), 3)} if "forward" in sound[0] else {}),
    }


def table(model: str, rows: dict[str, Any]) -> str:
    lines = [f"### {model}", "", "CPU seconds, medians.", ""]
    lines += [
        "| tool | quantize | trace | write | whole | runs | wall time, range | peak MB (before) | top-1 % |",
        "|---" * 9 + "|",
    ]
    for tool, row in rows.items():
        if "error" in row:
            lines.append(f"| {tool} | failed: {row['error']} | | | | | | | |")
            continue
        top1 = f"{row['top1']:.2f}" if "top1" in row else ""
        trace, quantize, write = (row["phases"][name] for name in ("trace", "quantize", "write"))
        lines.append(
            f"| {tool} | {quantize:.2f} | {trace:.2f} | {write:.2f} | {row['cpu_seconds']:.2f} | {row['runs']} "
            f"| {row['fastest']:.1f}–{row['slowest']:.1f} | {row['peak_mb']} ({row['before_mb']}) | {top1} |"
        )
    peers = [row for tool, row in rows.items() if tool != "bitwright" and "error" not in row]
    own = rows.get("bitwright", {"error": ""})
    if peers and "error" not in own:
        calibration = own["phases"]["quantize"] / min(row["phases"]["quantize"] for row in peers)
        whole = own["cpu_seconds"] / min(row["cpu_seconds"] for row in peers)
        lines += [
            "",
            f"Ours / best peer: {calibration:.2f} for plain calibration (bar 0.5), {whole:.2f} for the whole.",
        ]
    if "forward" in own:
        lines.append(f"The float model's forward of these batches by itself: {own['forward']:.2f}.")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
