"""Our plans beside QSync's published mappers: T4s with low precision and V100s in float32 that train together.

    python benchmarks/qsync_allocation.py --mappers FOLDER [--graphs FOLDER] [--models bert …]

Both plans are predicted as QSync runs them (`QSyncExecution`): costs from `published.yaml` (T4s under sustained load),
with QSync's published costs of casts. Penalties are gradient-variance scores of models with random weights. Norms have
no score, and count 0 in both. Our plan has the step time of the mapper as its limit.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from common import environment, save
from qsync_models import MODELS, Steps, batch_of, loss_of, model_of, settings

from bitwright import capture, score_operators
from bitwright.cluster import Cluster, Link
from bitwright.cluster.cluster_cost_model import ClusterCostModel
from bitwright.cluster.cost_model import FLOAT
from bitwright.cluster.planners import Allocation, allocation, equal_batches, recover, uniform
from bitwright.core.files import write_text
from bitwright.core.tensor_tree import map_tensors
from bitwright.importers.qsync import QSYNC_FORMATS, QSyncExecution, load_mapper, plan_of_mapper
from bitwright.plan import ComputeSpec
from bitwright.profiling import IMPLEMENTATIONS, StepGraph
from bitwright.profiling.published_profile import derived_profile

BATCHES = {"resnet50": 128, "vgg16": 128, "bert": 12, "roberta": 16}  # of QSync's scripts
DEVICES = 16  # of each kind, as in QSync's larger cluster
FORMATS = ("fp16", "int8")
SCORED, PIXELS, TOKENS = 4, 64, 32  # samples, and their sizes, for the scores


def small_batch(name: str) -> tuple[Any, torch.Tensor]:
    inputs, target = batch_of(name, SCORED)

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[..., :PIXELS, :PIXELS] if tensor.is_floating_point() else tensor[..., :TOKENS]

    return map_tensors(inputs, cut), target


def scores_of(name: str, graph: StepGraph) -> dict[str, dict[str, float]]:
    """The penalty of each operator that QSync has a kernel for."""
    scores = score_operators(model_of(name), [small_batch(name)], loss_of(name), formats=list(FORMATS)).values
    found = {op: {f: own[f] for f in FORMATS if f in own} for op, own in scores.items()}
    kinds = {op.name: op.call.kind for op in graph.ops}
    layers = {op: own for op, own in found.items() if kinds.get(op) in ("linear", "conv2d", "embedding")}
    return {**layers, **{op: {"fp16": 0.0} for op, kind in kinds.items() if kind == "layer_norm"}}


def cost_model(name: str, graph: StepGraph) -> ClusterCostModel:
    profiles = {
        "t4": derived_profile("nvidia-t4-sustained", graph, QSYNC_FORMATS),
        "v100": derived_profile("nvidia-v100", graph),
    }
    cluster = Cluster.of(dict.fromkeys(profiles, DEVICES), link=Link(latency_us=20, gbit_per_s=100))
    computes = {format: ComputeSpec(format=format) for format in FORMATS}
    return ClusterCostModel(graph, profiles, cluster, scores_of(name, graph), computes, settings=settings(name))


def of_mapper(costs: ClusterCostModel, name: str, file: Path) -> Allocation:
    """The mapper as an allocation: T4s follow it, V100s stay in float."""
    model = model_of(name)
    plan = plan_of_mapper(load_mapper(file), capture(model, small_batch(name)[0]), model=model)
    low = {op: spec.format for op, spec in plan.compute.items() if spec.is_low_precision}
    own = {op: low[op] if low.get(op) in costs.formats("t4", op) else FLOAT for op in costs.operators}
    left = [op for op in low if own.get(op, FLOAT) != low[op]]
    if left:
        raise SystemExit(f"{file.name}: {left[:5]} have no costs")
    return allocation(costs, {"t4": own, "v100": dict.fromkeys(costs.operators, FLOAT)}, equal_batches(costs))


def counted(plan: Any) -> str:
    return ", ".join(f"{sum(f == format for f in plan.values())} {format}" for format in (*FORMATS, FLOAT))


def rows_of(name: str, folder: Path, steps: Steps) -> list[dict[str, Any]]:
    graph = steps.of(name, BATCHES[name])
    costs = cost_model(name, graph)
    files = sorted(file for file in folder.glob("*.npy") if f"__{name}_" in file.name)
    rows = []
    for file in files:
        theirs = of_mapper(costs, name, file)
        ours = recover(costs, target=theirs.seconds)
        row = {"model": name, "mapper": file.name, "batch": BATCHES[name]}
        for which, one in (("theirs", theirs), ("ours", ours)):
            row[which] = {"seconds": one.seconds, "penalty": one.penalty, "memory": dict(one.memory)}
            row[which]["formats"] = counted(one.plans["t4"])
        row["limit"] = costs.limit("t4")
        row["float_seconds"] = uniform(costs, FLOAT).seconds
        rows.append(row)
        print(row, flush=True)
    return rows


def report(rows: list[dict[str, Any]]) -> None:
    good = sum(
        row["ours"]["seconds"] <= row["theirs"]["seconds"] * (1 + 1e-9)
        and row["ours"]["penalty"] < row["theirs"]["penalty"]
        for row in rows
    )
    lines = [
        f"# Our plans beside QSync's mappers: {DEVICES} T4 and {DEVICES} V100",
        "",
        f"For {good} of {len(rows)} mappers our plan has the same or a shorter replayed step and a smaller penalty. "
        "V100s run float32. Costs are derived, not measured; memory is the predicted peak of a process on a T4.",
        "",
        "| mapper | batch | step | ours | penalty | ours | memory | ours | operators | ours |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        theirs, ours = row["theirs"], row["ours"]
        lines.append(
            f"| {row['mapper']} | {row['batch']} | {1e3 * theirs['seconds']:.1f} ms | {1e3 * ours['seconds']:.1f} ms "
            f"| {theirs['penalty']:.3g} | {ours['penalty']:.3g} | {theirs['memory']['t4'] / 1e9:.1f} GB "
            f"| {ours['memory']['t4'] / 1e9:.1f} GB | {theirs['formats']} | {ours['formats']} |"
        )
    save("qsync_allocation", {"environment": environment(), "rows": rows}, "\n".join(lines))
    if good < len(rows):
        raise SystemExit(f"{len(rows) - good} mappers are better than our plans")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mappers", type=Path, required=True, help="the folder of the published mappers")
    parser.add_argument("--graphs", type=Path, help="keep the recorded steps in this folder")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--output", type=Path, help="write the rows as JSON here, and not to results/")
    chosen = parser.parse_args()
    IMPLEMENTATIONS.register("qsync", QSyncExecution())
    steps = Steps(chosen.graphs)
    rows = [row for name in chosen.models for row in rows_of(name, chosen.mappers, steps)]
    if chosen.output is not None:
        write_text(chosen.output.with_suffix(".json"), json.dumps({"rows": rows}))
        return
    report(rows)


if __name__ == "__main__":
    main()
