"""Training ResNet-20 with real INT8 kernels beside float, on CIFAR-10 (BITWRIGHT_DATA): accuracy and gradients.

    python benchmarks/lowprecision_cifar10.py [--seeds 3] [--images 12500] [--folder lowprecision-runs]

Runs of one seed have the same data order and settings. Stem and head stay float. Beside float: INT8 everywhere else,
forward and the gradient of the input; the same and the gradient of the weight; and what the planner `fastest` makes of
both by a profile of this machine. Bar: the mean within 0.5 points of float's, and the cosine between the gradients of
the whole model at least 0.98. Plans and runs are kept in --folder: an interrupted benchmark goes on where it was.
"""

from __future__ import annotations

import argparse
import copy
import re
from collections import Counter
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
from bitwright.zoo.networks import ResNet20
from kernels import planned

ENDS = ("conv1", "linear")


def everywhere(*backward: str) -> bw.Plan:
    ends = dict.fromkeys(ENDS, ComputeSpec(format="float", why="first and last layer"))
    return bw.Plan(compute={"*": ComputeSpec(format="int8", backward=backward), **ends})


def fastest_here() -> bw.Plan:
    """By a profile of channels-last steps of 64 images."""
    model = ResNet20().train().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = torch.randn(64, 3, 32, 32).to(memory_format=torch.channels_last)
    graph = bw.capture(model, images)

    def make(plan: bw.Plan | None) -> torch.nn.Module:
        own = copy.deepcopy(model)
        return own if plan is None else bw.prepare(own, plan, graph=graph)

    return planned(make, (images, torch.randint(0, 10, (64,))), graph, keep_float=ENDS)


def plans(folder: Path) -> dict[str, bw.Plan | None]:
    kept = folder / "fastest.yaml"
    if not kept.exists():
        folder.mkdir(parents=True, exist_ok=True)
        fastest_here().save(kept)
    return {
        "float": None,
        "INT8": everywhere("input"),
        "INT8, weight's gradient too": everywhere("input", "weight"),
        "planned": bw.Plan.load(kept),
    }


RUNS: dict[str, dict[str, Any]] = {
    "from the checkpoint": {"share": 1.0, "epochs": 2, "lr": 0.01},
    "from scratch": {"share": 0.5, "epochs": 4, "lr": 0.1, "warmup": 0.5},
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


def cosine(made: Workload, plan: bw.Plan, batches: int, size: int) -> list[float]:
    """Between float's gradients and the plan's, of augmented training batches."""
    assert made.training is not None
    data = made.training()
    torch.manual_seed(0)
    found = []
    for batch in range(batches):
        items = data.__getitems__(list(range(batch * size, (batch + 1) * size)))  # type: ignore[attr-defined]
        images, labels = made.collate(items) if made.collate is not None else items
        both = [gradients(made.model, images, labels, p) for p in (None, plan)]
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
    ways = plans(arguments.folder)
    rows: list[dict[str, Any]] = []
    angles: dict[str, dict[str, dict[int, list[float]]]] = {}
    for start in arguments.starts:
        settings = dict(RUNS[start])
        images = int(arguments.images * settings.pop("share"))
        angles[start] = {
            way: {size: cosine(workload(start, images, 0), plan, 8, size) for size in (64, 256)}
            for way, plan in ways.items()
            if plan is not None
        }
        print(start, {w: {s: mean(v) for s, v in found.items()} for w, found in angles[start].items()}, flush=True)
        for seed in range(0 if arguments.only_cosine else arguments.seeds):
            for way, plan in ways.items():
                config = TrainConfig(**settings, batch=64, channels_last=True, seed=seed)
                folder = arguments.folder / re.sub(r"\W+", "-", f"{start} {way} {seed}")
                result = Trainer(
                    workload(start, images, seed), compute=plan, config=config, out=folder, resume=True
                ).fit()
                top = [values["top1"] for values in result.metrics]
                row = {"start": start, "way": way, "seed": seed, "images": images, "top1": top}
                rows.append({**row, "config_hash": config.digest})
                print(rows[-1], flush=True)
    if arguments.only_cosine:
        return
    found = ways["planned"]
    assert found is not None
    low = Counter("/".join(("int8", *spec.backward)) for spec in found.compute.values() if spec.is_low_precision)
    chosen = ", ".join(f"{count} × {name}" for name, count in low.items()) or "float everywhere"
    lines = [
        "# Training ResNet-20 in INT8 beside float, CIFAR-10, 10,000 test images",
        "",
        "Same seeds, order of data and settings; stem and head in float. INT8: all other convolutions, forward and "
        f"input gradient. Planned: what is fastest on this machine ({chosen}). Bar: within 0.5 points.",
        "",
        "| start | training images, epochs | way | top-1 | of float | each seed | cosine, batch 64 | batch 256 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for start in arguments.starts:
        last = {way: [row["top1"][-1] for row in rows if row["start"] == start and row["way"] == way] for way in ways}
        size = next(row["images"] for row in rows if row["start"] == start)
        for way, values in last.items():
            spread = stdev(values) if len(values) > 1 else 0.0
            cells = [f"{mean(values):.2f} ± {spread:.2f}", f"{mean(values) - mean(last['float']):+.2f}"]
            cells.append(", ".join(f"{value:.2f}" for value in values))
            angle = angles[start].get(way, {})
            cells += [
                f"{mean(angle[n]):.4f} ({min(angle[n]):.4f}–{max(angle[n]):.4f})" if angle else "" for n in (64, 256)
            ]
            lines.append(f"| {start} | {size:,} × {RUNS[start]['epochs']} | {way} | {' | '.join(cells)} |")
    lines += ["", "Cosines (bar 0.98): between the gradients of the whole model, means of 8 augmented batches."]
    save("lowprecision_cifar10", {"environment": environment(), "rows": rows, "cosine": angles}, "\n".join(lines))


if __name__ == "__main__":
    main()
