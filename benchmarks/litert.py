"""INT8 on LiteRT with real images: accuracy of the artefact, and its agreement with the simulated model.

    BITWRIGHT_DATA=... python benchmarks/litert.py [--models resnet20-cifar10 ...] [--images 10000] [--workers 2]

The formats are those of phones: weights int8 per channel, activations int8 per tensor with a zero point. Agreement is
the share of images for which the runtime and the simulation predict the same class. `litert_reference` is compared with
the simulation of its fixed-point rounding, as in `bitwright check`, and `litert` (XNNPACK) with the float32 simulation.
The images are divided among processes with one thread each.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import environment, save
from numpy.typing import NDArray
from torch import Tensor

import bitwright as bw
from bitwright.core.registry import RUNTIMES as KERNELS

MODELS = {"resnet20-cifar10": 0.3, "efficientnet-lite0-imagenet": 1.0}
"""The points of top-1 that INT8 may lose."""
FORMATS = {"weights": "int8/channel/sym", "activations": "int8/tensor/asym"}
RUNTIMES = ("litert_reference", "litert")
AGREEMENT = 99.9  # percent, on the reference kernels
_CHUNK = 10  # images


def quantized(name: str, folder: Path) -> None:
    """Quantize a model; save it and its .tflite file."""
    workload = bw.load_workload(name)
    assert workload.calibration is not None
    made = bw.quantize(
        workload.model,
        list(workload.calibration()),
        example=workload.inputs,
        backend="tflitemicro",
        measure=False,
        **FORMATS,
    )
    made.save(folder / "model")
    images = torch.cat(workload.inputs).repeat(_CHUNK, 1, 1, 1)
    KERNELS.get("litert").write(made.model, folder / "model.tflite", images)


def predictions(name: str, folder: Path, part: range) -> dict[str, NDArray[np.int64]]:
    """The labels of some images, and the classes that each side predicts for them."""
    torch.set_num_threads(1)
    workload = bw.load_workload(name)
    float_model = workload.model.eval()
    simulated = bw.load(folder / "model", bw.load_workload(name)).model
    opened = {runtime: bw.open_runtime(runtime, folder / "model.tflite", threads=1) for runtime in RUNTIMES}
    found: dict[str, list[Any]] = {"label": []}
    for chunk in _chunks(workload, part):
        images = torch.stack([image for image, _ in chunk])
        found["label"] += [int(label) for _, label in chunk]
        with torch.no_grad():
            outputs = {"float": float_model(images), "simulation": simulated(images)}
            with opened["litert_reference"].simulating(simulated):
                outputs["simulation of the rounding"] = simulated(images)
            outputs |= {runtime: session(images) for runtime, session in opened.items()}
        for side, output in outputs.items():
            found.setdefault(side, []).extend(output.argmax(dim=1).tolist())
    return {side: np.array(values) for side, values in found.items()}


def _chunks(workload: bw.Workload, part: range) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """The images of this part with their labels, a few at a time."""
    assert workload.evaluation is not None
    pairs = (pair for images, labels in workload.evaluation() for pair in zip(images, labels, strict=True))
    left = islice(pairs, part.start, part.stop)
    while chunk := list(islice(left, _CHUNK)):
        yield chunk


def measure(name: str, images: int | None, workers: int) -> dict[str, Any]:
    """The row of one model."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        quantized(name, folder)
        workload = bw.load_workload(name)
        assert workload.evaluation is not None
        count = sum(len(labels) for _, labels in workload.evaluation())
        count = count if images is None else min(count, images)
        size = -(-count // (workers * _CHUNK)) * _CHUNK
        parts = [range(start, min(start + size, count)) for start in range(0, count, size)]
        with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
            done = list(pool.map(partial(predictions, name, folder), parts))
    found = {side: np.concatenate([one[side] for one in done]) for side in done[0]}
    labels = found.pop("label")

    def share(a: NDArray[np.int64], b: NDArray[np.int64]) -> float:
        return round(100 * float((a == b).mean()), 3)

    return {
        "images": count,
        "top1": {side: share(classes, labels) for side, classes in found.items()},
        "agreement": {
            "litert_reference": share(found["litert_reference"], found["simulation of the rounding"]),
            "litert_reference, float32 simulation": share(found["litert_reference"], found["simulation"]),
            "litert": share(found["litert"], found["simulation"]),
        },
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    """The rows of all models in Markdown, and whether they meet the limits."""
    heads = ["model", "images", "float", "INT8", "change (limit)", "agreement (limit)", "XNNPACK", "its agreement"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for name, row in results.items():
        top1, same = row["top1"], row["agreement"]
        change = top1["litert_reference"] - top1["float"]
        cells = [
            name,
            f"{row['images']:,}",
            f"{top1['float']:.2f}",
            f"{top1['litert_reference']:.2f}",
            f"{change:+.2f} (−{MODELS[name]}) {_verdict(change >= -MODELS[name])}",
            f"{same['litert_reference']:.2f} ({AGREEMENT}) {_verdict(same['litert_reference'] >= AGREEMENT)}",
            f"{top1['litert']:.2f}",
            f"{same['litert']:.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _verdict(met: bool) -> str:
    return "met" if met else "MISSED"


_HEAD = """\
# INT8 on LiteRT

Weights int8 per channel, activations int8 per tensor with a zero point. All numbers are top-1 accuracy or shares of
images, in percent. INT8 and agreement are those of `litert_reference`, whose fixed-point rounding `check` simulates.
The last columns are those of `litert` (XNNPACK), compared with the float32 simulation.

"""


def main() -> None:
    """Measure and keep the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--images", type=int, help="fewer than all")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    os.environ.setdefault("BITWRIGHT_DATA", str(Path(__file__).parents[2] / "shared" / "data"))
    torch.set_num_threads(1)
    results = {name: measure(name, options.images, options.workers) for name in options.models}
    save("litert", {"environment": environment(), "results": results}, _HEAD + table(results))


if __name__ == "__main__":
    main()
