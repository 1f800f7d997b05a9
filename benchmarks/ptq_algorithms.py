"""PTQ algorithms on real data: what each of them wins back, and how long it takes.

    python benchmarks/ptq_algorithms.py [--only efficientnet/w4a8 ...] [--folder ptq-rows]

Each row is kept in the folder when it is done, and a row that is under way goes on from its last unit: the benchmark
can be stopped at any time. Accuracy is that of the exported artefact on ONNX Runtime with its own optimizations off, so
that every Q/DQ pair is computed as it is written (fused kernels saturate on CPUs without VNNI: another matter).
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import onnxruntime
import torch
from common import environment, save
from torch import Tensor

import bitwright as bw
from bitwright.core.files import write_text
from bitwright.zoo.data import Images, data_folder, npz_images

EFFICIENTNET = {"backend": "onnxruntime", "saturating": False}
W8T = {**EFFICIENTNET, "weights": "int8/tensor/sym"}
W4C = {**EFFICIENTNET, "weights": "int4/channel/sym", "weight_observer": "mse"}
RESNET = {
    "backend": "academic",
    "weights": "int4/channel/sym",
    "weight_observer": "mse",
    "activations": "int4/tensor/sym/adasign",
    "observer": "mse",
    "first_last_bits": 8,
}
LIGHT = "iterations=40,batch=4,lr=0.05"  # of EfficientNet-Lite0, one iteration over all blocks takes seconds here
LAYER = "iterations=100,lr=0.03"
BLOCK = "iterations=200,lr=0.03"  # two layers at once: as many optimizer steps in all as by layers
SEEDS = 3
IMAGES = 1024  # of which others for each seed

# table → row → (choices, steps)
ROWS: dict[str, dict[str, tuple[dict[str, Any], list[str]]]] = {
    "efficientnet/w8a8-tensor": {
        "minmax": (W8T, []),
        "bias-correction": (W8T, ["bias-correction"]),
        "equalize": (W8T, ["equalize"]),
        "equalize, bias-correction": (W8T, ["equalize", "bias-correction"]),
    },
    "efficientnet/w4a8-channel": {
        "nearest": (W4C, []),
        "adaround": (W4C, [f"adaround:{LIGHT}"]),
        "brecq": (W4C, [f"brecq:{LIGHT}"]),
        "qdrop": (W4C, [f"qdrop:{LIGHT}"]),
    },
    "resnet20/w4a4": {
        "nearest": (RESNET, []),
        "adaround": (RESNET, [f"adaround:{LAYER}"]),
        "brecq": (RESNET, [f"brecq:{BLOCK}"]),
        "qdrop": (RESNET, [f"qdrop:{BLOCK}"]),
    },
}
TITLES = {
    "efficientnet/w8a8-tensor": "EfficientNet-Lite0, 1,000 ImageNet images: W8A8, weights per tensor",
    "efficientnet/w4a8-channel": "EfficientNet-Lite0, 1,000 ImageNet images: W4A8, weights per channel",
    "resnet20/w4a4": "ResNet-20, CIFAR-10, 10,000 images: W4A4, first and last layer 8 bits",
}
FLOATS = {"efficientnet": 73.7, "resnet20": 91.73}
MEAN, STD = (0.485 * 255, 0.456 * 255, 0.406 * 255), (0.229 * 255, 0.224 * 255, 0.225 * 255)


def calibration(images: Images) -> Iterator[Tensor]:
    for batch, _ in images.batches(64, mean=MEAN, std=STD):
        yield batch


def run(table: str, choices: dict[str, Any], steps: list[str], seed: int, folder: Path) -> dict[str, Any]:
    """Quantize, export, and measure the artefact."""
    small = table.startswith("resnet20")
    work = bw.load_workload("resnet20-cifar10" if small else "efficientnet-lite0-imagenet")
    data = work.calibration
    if small:  # another seed has other images to calibrate with, too
        data = partial(calibration, npz_images(data_folder() / "cifar10" / "train25k.npz").take(IMAGES, seed=seed))
    begin = time.perf_counter()
    quantized = bw.quantize(
        work.model, data, example=work.inputs, steps=steps, seed=seed, folder=folder / "steps", **choices
    )
    seconds = time.perf_counter() - begin
    artefact = quantized.export(folder / "model.onnx")
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(artefact.path, options)
    name = session.get_inputs()[0].name
    top1 = bw.evaluate(work, lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0]))["top1"]
    artefact.path.unlink()
    return {"top1": top1, "seconds": seconds, "steps": [str(ran.step) for ran in quantized.steps]}


def seeds(table: str) -> int:
    return SEEDS if table.startswith("resnet20") else 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", default=list(ROWS), choices=ROWS)
    parser.add_argument("--rows", nargs="*", default=None)
    parser.add_argument("--folder", type=Path, default=Path("ptq-rows"))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for table, rows in ROWS.items():
        for name, (choices, steps) in rows.items():
            for seed in range(seeds(table)):
                folder = arguments.folder / f"{table}/{name}/{seed}".replace(", ", "+")
                kept = folder / "row.json"
                wanted = table in arguments.only and (arguments.rows is None or name in arguments.rows)
                if wanted and not kept.is_file():
                    folder.mkdir(parents=True, exist_ok=True)
                    row = run(table, choices, steps, seed, folder)
                    write_text(kept, json.dumps(row, indent=1) + "\n")
                    print(table, name, seed, row, flush=True)
                    gc.collect()
                if kept.is_file():
                    found.setdefault(table, {}).setdefault(name, []).append(json.loads(kept.read_text()))
    save("ptq_algorithms", {"environment": environment(), "rows": found}, "\n".join(text(found)))


def text(found: dict[str, dict[str, list[dict[str, Any]]]]) -> Iterator[str]:
    yield "# PTQ algorithms on real data"
    yield ""
    yield "Top-1 in per cent of the exported artefact on ONNX Runtime; wall minutes of calibration and steps, on"
    yield "one core that other work shared, so minutes compare poorly. Without an entry under steps: calibration alone."
    yield "EfficientNet-Lite0 is calibrated and fitted on 100 of its 1,000 evaluation images (there are no others;"
    yield "inputs only, never labels); ResNet-20 on 1,024 training images, others for each seed."
    missing = [
        f"{table} {name} ({len(found.get(table, {}).get(name, []))} of {seeds(table)} seeds)"
        for table, rows in ROWS.items()
        for name in rows
        if len(found.get(table, {}).get(name, [])) < seeds(table)
    ]
    if missing:
        yield from ("", f"Not all rows were run: {', '.join(missing)}.")
    for table, rows in found.items():
        yield from ("", f"## {TITLES[table]}", "", f"Float: {FLOATS[table.partition('/')[0]]} %.", "")
        yield "| algorithm | steps | top-1 | to float | seeds | minutes |"
        yield "|---|---|---:|---:|---|---:|"
        for name, runs in rows.items():
            scores = [run["top1"] for run in runs]
            spread = f" ± {stdev(scores):.2f}" if len(scores) > 1 else ""
            each = ", ".join(f"{score:.2f}" for score in scores) if len(scores) > 1 else ""
            steps = ", ".join(f"`{step}`" for step in runs[0]["steps"])
            minutes = mean(run["seconds"] for run in runs) / 60
            lost = mean(scores) - FLOATS[table.partition("/")[0]]
            yield f"| {name} | {steps} | {mean(scores):.2f}{spread} | {lost:+.2f} | {each} | {minutes:.1f} |"


if __name__ == "__main__":
    main()
