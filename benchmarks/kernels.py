"""INT8 training against FP32: ResNet-20, blocks of ResNet-18, a layer of BERT-base; whole steps in turns, one thread.

    python benchmarks/kernels.py [--steps 15] [--models ResNet-20 …]

INT8 everywhere, and as planned: the model is profiled (float and INT8, in channels-last memory), and the planner
`fastest` chooses for each operator. Results are `kernels_vnni` on a CPU that has it, and `kernels` on others, or with
ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

import torch
import torch.nn.functional as F
from common import environment, save
from torch import Tensor, nn

import bitwright as bw
from bitwright.cluster import Cluster
from bitwright.cluster.cluster_cost_model import ClusterCostModel
from bitwright.cluster.planners import fastest
from bitwright.kernels import products
from bitwright.kernels.codes import FULL
from bitwright.plan import ComputeSpec
from bitwright.profiling import Variant, halves, profile_variants, record_step
from bitwright.zoo.networks import ResNet20

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


def planned(
    make: Callable[[bw.Plan | None], nn.Module],
    batch: tuple[Tensor, Tensor],
    graph: bw.Graph,
    keep_float: Sequence[str] = (),
) -> bw.Plan:
    """The fastest plan by a profile of this machine."""
    specs = {execution: WAYS[execution] for execution in ("+ input gradient", "+ weight gradient")}
    plans = [everywhere(graph, spec) for spec in specs.values()]
    plans += [half for plan in plans for half in halves(plan)]
    models = [Variant(model=make(None)), *(Variant(model=make(plan), plan=plan) for plan in plans)]
    here = profile_variants(models, batch, F.cross_entropy, clock="cpu", rounds=9, fit_casts=False)
    recorded = record_step(make(None), batch, F.cross_entropy)
    penalties = {name: dict.fromkeys(specs, 1.0) for name in plans[0].compute}
    cluster = Cluster.of({"here": 1})
    costs = ClusterCostModel(recorded, {"here": here}, cluster, penalties, specs, keep_float=keep_float)
    return costs.to_plan(fastest(costs)).for_device("here")


def everywhere(graph: bw.Graph, spec: ComputeSpec) -> bw.Plan:
    """All operators but products of attention: those are many small ones."""
    plan = bw.Plan(compute={"*": spec}).resolve(graph)
    return replace(plan, compute={op: o for op, o in plan.compute.items() if graph.by_name[op].kind != "matmul"})


def variants(model: nn.Module, x: Tensor) -> tuple[dict[str, Callable[[], None]], dict[str, float], str]:
    """Float as it is, float in channels-last memory, INT8 in each way and as planned; with the cosine of gradients."""
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
        low = plan is not None and any(spec.is_low_precision for spec in plan.compute.values())
        return bw.prepare(made, plan, graph=graph) if low else made

    if images:
        runs["fp32 channels-last"] = step(own(None), last, y)
    cosines: dict[str, float] = {}
    exact = _gradients(own(None), last, y)
    plans = {f"int8 {name}": everywhere(graph, spec) for name, spec in WAYS.items()}
    plans["planned"] = planned(own, (last, y), graph)
    for name, plan in plans.items():
        runs[name] = step(own(plan), last, y)
        cosines[name] = float(torch.cosine_similarity(_gradients(own(plan), last, y), exact, dim=0))
    low = sum(spec.is_low_precision for spec in plans["planned"].compute.values())
    return runs, cosines, f"{low} of {len(plans['int8 forward'].compute)} operators in INT8"


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
    parser.add_argument("--models", nargs="*", default=[""], help="beginnings of names")
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
    models = {name: one for name, one in models.items() if name.startswith(tuple(options.models))}
    chosen = {}
    for name, (model, x) in models.items():
        runs, cosines, chosen[name] = variants(model, x)
        found = times(runs, options.steps)
        for execution, seconds in found.items():
            row = {
                "model": name,
                "way": execution,
                "ms": round(1e3 * seconds, 1),
                "ratio": round(seconds / found["fp32"], 3),
                "cosine": round(cosines[execution], 5) if execution in cosines else None,
            }
            rows.append(row)
            print(row, flush=True)
    name, where = ("kernels", "") if products.limit() < FULL else ("kernels_vnni", ", on a CPU with VNNI")
    lines = [
        f"# A step of training in INT8 against FP32{where}",
        "",
        "Forward, backward and SGD; CPU time of one thread, medians of steps in turns. INT8 is channels-last.",
        "",
        "| model | way | ms | of FP32 | cosine of gradients |",
        "|---|---|---|---|---|",
        *(f"| {r['model']} | {r['way']} | {r['ms']} | {r['ratio']} | {r['cosine'] or ''} |" for r in rows),
    ]
    ratios = {name: {r["way"]: r["ratio"] for r in rows if r["model"] == name} for name in models}
    lines += [
        "",
        *(
            f"- {name}: best INT8 everywhere {min(r for way, r in own.items() if str(way).startswith('int8'))}, "
            f"planned {own['planned']} ({chosen[name]}); bar 0.85, goal 0.70"
            for name, own in ratios.items()
        ),
    ]
    save(name, {"rows": rows, "environment": environment(steps=options.steps)}, "\n".join(lines))


if __name__ == "__main__":
    main()
