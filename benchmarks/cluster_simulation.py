"""4,096 devices of six kinds in nodes of eight: what planning, batches by speed and adaptation gain, with disruptions.

    python benchmarks/cluster_simulation.py [--seeds 20] [--hours 8]

BERT-base, 32 × 128 tokens for each device; costs from data sheets with fitted efficiencies (`published.yaml`). Rings
over all devices, and hierarchical all-reduce. Writes a chart with 95 % confidence intervals.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from common import RESULTS, environment, save
from torch import Tensor

from bitwright import score_operators
from bitwright.cluster import Cluster, Link, Nodes, Simulation, simulate_training
from bitwright.cluster.cluster_cost_model import ClusterCostModel
from bitwright.plan import ComputeSpec
from bitwright.profiling import StepGraph, StepSettings, record_step
from bitwright.profiling.published_profile import derived_profile
from bitwright.profiling.step_graph import extrapolate

COUNTS = {"t4": 1536, "v100": 768, "l4": 640, "a10": 640, "a100": 384, "h100": 128}
SAMPLES, LENGTH = 32, 128
FP16 = ComputeSpec(format="fp16", backward=("input", "weight"))
NODES = Nodes(devices=8, link=Link(latency_us=3, gbit_per_s=400))
BETWEEN = Link(latency_us=5, gbit_per_s=100)


def loss(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits, target)


def workload() -> tuple[StepGraph, dict[str, dict[str, float]]]:
    """The step of BERT-base, and the penalty of FP16 for each product."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig())
    batches = [({"input_ids": torch.randint(5, 30000, (count, LENGTH))}, torch.arange(count) % 2) for count in (2, 3)]
    small, large = [record_step(model, batch, loss, name="bert-base") for batch in batches]
    graph = extrapolate(small, large, SAMPLES)
    scores = score_operators(model, batches[:1], loss, indicator="weight-variance", formats=["fp16"]).values
    linears = {op.name for op in graph.ops if op.call.kind == "linear"}
    return graph, {name: {"fp16": own["fp16"]} for name, own in scores.items() if name in linears}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--hours", type=float, default=8.0)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    start, cpu = time.perf_counter(), time.process_time()
    graph, penalties = workload()
    profiles = {kind: derived_profile(f"nvidia-{kind}", graph, ["kernel fp16/input+weight"]) for kind in COUNTS}
    recorded = time.process_time() - cpu
    found: dict[str, Simulation] = {}
    for network in ("ring", "hierarchical"):
        cluster = Cluster.of(COUNTS, link=BETWEEN, nodes=NODES, all_reduce=network)
        settings = StepSettings(optimizer="adamw")
        costs = ClusterCostModel(graph, profiles, cluster, penalties, {"fp16": FP16}, settings=settings)
        found[network] = simulate_training(costs, hours=chosen.hours, seeds=chosen.seeds)
        print(network, time.process_time() - cpu, flush=True)
    taken = {"cpu_seconds": time.process_time() - cpu, "wall_seconds": time.perf_counter() - start}
    results = tuple(
        replace(one, name=f"{network}: {one.name}") for network, own in found.items() for one in own.results
    )
    together = replace(found["ring"], results=results)
    together.plot().save(RESULTS / "cluster_simulation.svg")
    lines = [
        f"# {sum(COUNTS.values()):,} devices of six kinds, with slow periods and failures",
        "",
        f"BERT-base, {SAMPLES} × {LENGTH} tokens for each device; "
        + ", ".join(f"{count} {kind.upper()}" for kind, count in COUNTS.items())
        + f". Nodes of {NODES.devices} devices: {NODES.link.gbit_per_s:g} Gbit/s inside, {BETWEEN.gbit_per_s:g} Gbit/s "
        f"between. {chosen.hours:g} hours, {chosen.seeds} seeds; each device is slow for 20 minutes once a day, by a "
        "factor of 1.25, 1.5 or 2, and fails every 20,000 hours. Times are derived from data sheets, not measured.",
        "",
        "![Samples per second relative to float with a ring](cluster_simulation.svg)",
        "",
        f"{taken['cpu_seconds']:.0f} CPU seconds, of which {recorded:.0f} record the step and score its operators.",
    ]
    for network, own in found.items():
        base = {name: own.result(name) for name in ("float", "one low format", "dynamic batching")}
        lines += [
            "",
            f"## {network}",
            "",
            "| policy | step | samples/s | relative to float | to one low format | to dynamic batching | lost time "
            "| penalty |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for one in own.results:
            gains = [one.interval(other) for other in base.values()]
            cells = " | ".join(f"{mean:.3f} ({low:.3f} to {high:.3f})" for mean, low, high in gains)
            rate, lost = one.interval()[0], sum(one.lost) / len(one.lost)
            lines.append(
                f"| {one.name} | {1e3 * one.step:.0f} ms | {rate:,.0f} | {cells} | {100 * lost:.1f} % "
                f"| {one.penalty:.3g} |"
            )
    data = {network: own.to_dict() for network, own in found.items()}
    save("cluster_simulation", {"environment": environment(), **taken, **data}, "\n".join(lines))


if __name__ == "__main__":
    main()
