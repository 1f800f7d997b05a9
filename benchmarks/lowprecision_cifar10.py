"""Training ResNet-20 with real INT8 kernels beside float, on CIFAR-10 (BITWRIGHT_DATA): accuracy and gradients.

    python benchmarks/lowprecision_cifar10.py [--seeds 3] [--images 12500] [--folder lowprecision-runs]

Each pair of runs has the same seed, data order and settings. Stem and head stay float; every other convolution runs
forward and the gradient of its input in INT8. Bar: the mean within 0.5 points of float's, and the cosine between the
gradients of the whole model at least 0.98. Runs are kept in --folder: an interrupted benchmark goes on where it was.
"""

from __future__ import annotations

import argparse
import copy
import time
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import torch.nn.functional as F
from common import environment, save
from torch.utils.data import Dataset, Subset

import bitwright as bw
from bitwright import TrainConfig, Trainer, Workload
from bitwright.plan import ComputeSpec
from bitwright.zoo.resnet20 import ResNet20

FLOAT = ComputeSpec(format="float", why="first and last layer")
PLAN = bw.Plan(compute={"*": ComputeSpec(format="int8"), "conv1": FLOAT, "linear": FLOAT})
RUNS: dict[str, dict[str, Any]] = {
    "from the checkpoint": {"share": 1.0, "epochs": 2, "lr": 0.01},
    "from scratch": {"share": 0.25, "epochs": 4, "lr": 0.1, "warmup": 0.5},
}


def workload(start: str, images: int, seed: int) -> Workload:
    made = bw.load_workload("resnet20-cifar10")
    if start == "from scratch":
        torch.manual_seed(seed)
        made = replace(made, model=ResNet20())
    data = made.training
    assert data is not None
    chosen = torch.randperm(25_000, generator=torch.Generator().manual_seed(0))[:images].tolist()

    def part() -> Dataset[Any]:
        return Subset(data(), chosen)

    return replace(made, training=part)


def gradients(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor, plan: bw.Plan | None) -> torch.Tensor:
    """Of a copy in training mode."""
    own = copy.deepcopy(model).train()
    if plan is not None:
        bw.prepare(own, plan, inputs=images[:2])
    F.cross_entropy(own(images), labels).backward()
    if plan is not None:
        bw.strip(own)
    return torch.cat([p.grad.flatten() for p in own.parameters() if p.grad is not None])


def cosine(made: Workload, batches: int, size: int) -> list[float]:
    """Between float's gradients and INT8's, of augmented training batches."""
    assert made.training is not None
    data = made.training()
    torch.manual_seed(0)
    found = []
    for batch in range(batches):
        items = data.__getitems__(list(range(batch * size, (batch + 1) * size)))  # type: ignore[attr-defined]
        images, labels = made.collate(items) if made.collate is not None else items
        both = [gradients(made.model, images, labels, plan) for plan in (None, PLAN)]
        found.append(float(torch.cosine_similarity(both[0], both[1], dim=0)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--images", type=int, default=12_500)
    parser.add_argument("--folder", type=Path, default=Path("lowprecision-runs"))
    parser.add_argument("--starts", nargs="*", default=list(RUNS), choices=RUNS)
    parser.add_argument("--only-cosine", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows, angles = [], {}
    for start in arguments.starts:
        settings = dict(RUNS[start])
        images = int(arguments.images * settings.pop("share"))
        angles[start] = {size: cosine(workload(start, images, 0), 8, size) for size in (64, 256)}
        print(start, {size: mean(values) for size, values in angles[start].items()}, flush=True)
        for seed in range(0 if arguments.only_cosine else arguments.seeds):
            for precision in ("float", "int8"):
                config = TrainConfig(**settings, batch=64, channels_last=True, seed=seed)
                folder = arguments.folder / f"{start} {precision} {seed}".replace(" ", "-")
                began = time.process_time()
                result = Trainer(
                    workload(start, images, seed),
                    compute=PLAN if precision == "int8" else None,
                    config=config,
                    out=folder,
                    resume=True,
                ).fit()
                rows.append(
                    {
                        "start": start,
                        "precision": precision,
                        "seed": seed,
                        "images": images,
                        "config_hash": config.digest,
                        "top1": [values["top1"] for values in result.metrics],
                        "cpu_seconds": time.process_time() - began,
                    }
                )
                print(rows[-1], flush=True)
    if arguments.only_cosine:
        return
    lines = [
        "# Training ResNet-20 in INT8 beside float, CIFAR-10, 10,000 test images",
        "",
        "Same seeds, order of data and settings. INT8: every convolution but the stem, forward and input gradient.",
        "",
        "| start | training images, epochs | float, each seed | INT8, each seed | float | INT8 | difference |",
        "|---|---|---|---|---|---|---|",
    ]
    for start in arguments.starts:
        own = [row for row in rows if row["start"] == start]
        last = {p: [row["top1"][-1] for row in own if row["precision"] == p] for p in ("float", "int8")}
        cells = [", ".join(f"{value:.2f}" for value in values) for values in last.values()]
        cells += [f"{mean(v):.2f} ± {stdev(v) if len(v) > 1 else 0:.2f}" for v in last.values()]
        size = own[0]["images"]
        cells.append(f"{mean(last['int8']) - mean(last['float']):+.2f}")
        lines.append(f"| {start} | {size:,} × {RUNS[start]['epochs']} | {' | '.join(cells)} |")
    lines += ["", "Cosine between the gradients of the whole model, means of 8 augmented batches (bar 0.98):", ""]
    for start, found in angles.items():
        words = [f"batch {size}: {mean(all_):.4f} ({min(all_):.4f}–{max(all_):.4f})" for size, all_ in found.items()]
        lines.append(f"- {start}: {'; '.join(words)}")
    save("lowprecision_cifar10", {"environment": environment(), "rows": rows, "cosine": angles}, "\n".join(lines))


if __name__ == "__main__":
    main()
