"""INT8 training against FP32: layers of ResNet-20, ResNet-18 and BERT-base, and whole steps, in turns, one thread.

python benchmarks/kernels.py [--steps 15]
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch
import torch.nn.functional as F
from common import environment, save
from torch import Tensor, nn

import bitwright as bw
from bitwright.plan import ComputeSpec
from bitwright.zoo.resnet20 import ResNet20

WAYS = {
    "forward": ComputeSpec(format="int8", backward=()),
    "+ input gradient": ComputeSpec(format="int8", backward=("input",)),
    "+ weight gradient": ComputeSpec(format="int8", backward=("input", "weight")),
    "all, stochastic": ComputeSpec(format="int8", backward=("input", "weight"), stochastic=True),
}
CONVS = {
    "ResNet-20 stage 1": (64, 16, 16, 32),
    "ResNet-20 stage 2": (64, 32, 32, 16),
    "ResNet-20 stage 3": (64, 64, 64, 8),
    "ResNet-18 stage 1": (16, 64, 64, 56),
    "ResNet-18 stage 2": (16, 128, 128, 28),
    "ResNet-18 stage 3": (16, 256, 256, 14),
    "ResNet-18 stage 4": (16, 512, 512, 7),
}


class BertLayer(nn.Module):
    """One layer of BERT-base and a head."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig
        from transformers.models.bert.modeling_bert import BertLayer as Layer

        self.layer = Layer(BertConfig(attn_implementation="sdpa"))
        self.head = nn.Linear(768, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return self.head((y[0] if isinstance(y, tuple) else y).mean(1))


def block(channels: int) -> nn.Module:
    """A basic block of ResNet-18 without the shortcut."""
    return nn.Sequential(
        nn.Conv2d(channels, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, 10),
    )


def step(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def run() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return run


def variants(model: nn.Module, x: Tensor) -> tuple[dict[str, Callable[[], None]], dict[str, float]]:
    """Float as it is, float in channels-last memory, and each way of INT8; with the cosine of gradients to float's."""
    torch.manual_seed(0)
    y = torch.randint(0, 10, (len(x),))
    graph = bw.capture(model, x)
    images = x.dim() == 4
    last = x.to(memory_format=torch.channels_last) if images else x
    runs: dict[str, Callable[[], None]] = {"fp32": step(copy.deepcopy(model).train(), x, y)}

    def own(plan: bw.Plan | None) -> nn.Module:
        made = copy.deepcopy(model).train()
        if images:
            made = made.to(memory_format=torch.channels_last)
        return made if plan is None else bw.prepare(made, plan, graph=graph)

    if images:
        runs["fp32 channels-last"] = step(own(None), last, y)
    cosines: dict[str, float] = {}
    exact = _gradients(own(None), last, y)
    for name, spec in WAYS.items():
        plan = bw.Plan(compute={"*": spec}).resolve(graph)
        # products of attention are many small ones: they stay float
        kept = {op: one for op, one in plan.compute.items() if graph.by_name[op].kind != "matmul"}
        plan = replace(plan, compute=kept)
        runs[f"int8 {name}"] = step(own(plan), last, y)
        cosines[f"int8 {name}"] = float(torch.cosine_similarity(_gradients(own(plan), last, y), exact, dim=0))
    return runs, cosines


def _gradients(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    F.cross_entropy(model(x), y).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def times(runs: dict[str, Callable[[], None]], steps: int) -> dict[str, float]:
    """Medians of CPU seconds: what another program takes isn't counted."""
    for run in runs.values():
        run()
        run()
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(steps):
        for name, run in runs.items():
            begin = time.process_time()
            run()
            found[name].append(time.process_time() - begin)
    return {name: median(values) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    models: dict[str, tuple[nn.Module, Tensor]] = {
        "ResNet-20, batch 64": (ResNet20(), torch.randn(64, 3, 32, 32)),
        "BERT-base layer, 16 × 128": (BertLayer(), torch.randn(16, 128, 768)),
    }
    for name, (batch, channels, _, size) in CONVS.items():
        if "18" in name:
            models[f"block of {name}, batch {batch}"] = (block(channels), torch.randn(batch, channels, size, size))
    for name, (model, x) in models.items():
        runs, cosines = variants(model, x)
        found = times(runs, options.steps)
        for way, seconds in found.items():
            row = {
                "model": name,
                "way": way,
                "ms": round(1e3 * seconds, 1),
                "ratio": round(seconds / found["fp32"], 3),
                "cosine": round(cosines[way], 5) if way in cosines else None,
            }
            rows.append(row)
            print(row, flush=True)
    lines = [
        "# A step of training in INT8 against FP32",
        "",
        "Forward, backward and SGD; CPU time of one thread, medians of steps in turns. INT8 is channels-last.",
        "",
        "| model | way | ms | of FP32 | cosine of gradients |",
        "|---|---|---|---|---|",
        *(f"| {r['model']} | {r['way']} | {r['ms']} | {r['ratio']} | {r['cosine'] or ''} |" for r in rows),
    ]
    best = {
        name: min(r["ratio"] for r in rows if r["model"] == name and str(r["way"]).startswith("int8"))
        for name in models
    }
    lines += ["", *(f"- {name}: best INT8 {ratio} (bar 0.85, goal 0.70)" for name, ratio in best.items())]
    save("kernels", {"rows": rows, "environment": environment(steps=options.steps)}, "\n".join(lines))


if __name__ == "__main__":
    main()
