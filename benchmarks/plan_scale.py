"""How long planning takes: BERT-base (12 layers of 768) on a cluster with four kinds of device. Bar: 30 s.

    python benchmarks/plan_scale.py [--rounds 3]

One step in float and in INT8 is really profiled here. The other three kinds are this device with other speeds, in float
and in INT8, and two of them have too little memory for a float step. Penalties are random, by a seed: planning takes as
long whatever they are.
"""

from __future__ import annotations

import argparse
import copy
import random
import time
from typing import Any

import torch
import torch.nn.functional as F
from common import environment, save
from torch import Tensor

from bitwright import Plan, capture, prepare
from bitwright.plan import ComputeSpec
from bitwright.planners import dynamic_batching, fastest, recover, recover_and_split, uniform
from bitwright.planners.cluster import OnCluster
from bitwright.planners.machine import FLOAT
from bitwright.predict import Cluster, Link
from bitwright.profile import DeviceProfile, Variant, profile, record_step
from bitwright.profile.device import OperatorCost, Timing

INT8 = ComputeSpec(format="int8", backward=("input", "weight"))
#: Of each kind: how many there are, how slow it is in float, and in INT8.
KINDS = {"new": (2, 0.4, 0.35), "here": (4, 1.0, 1.0), "old": (4, 2.0, 1.4), "small": (2, 1.5, 1.2)}
PLANNERS = {
    "fastest": fastest,
    "recover": recover,
    "recover+split": recover_and_split,
    "batches": dynamic_batching,
    "all int8": lambda machine: uniform(machine, "int8"),
}


def loss(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits, target)


def slower(own: DeviceProfile, plain: float, low: float) -> DeviceProfile:
    def scaled(timing: Timing | None, factor: float) -> Timing | None:
        if timing is None:
            return None
        values = {name: getattr(timing, name) * factor for name in ("seconds", "low", "high")}
        return timing.model_copy(update=values)

    operators: list[OperatorCost] = []
    for cost in own.operators:
        factor = low if cost.format.startswith("kernel") else plain
        times = {name: scaled(getattr(cost, name), factor) for name in ("forward", "backward")}
        operators.append(cost.model_copy(update=times))
    return own.model_copy(update={"operators": operators})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=12)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(num_hidden_layers=chosen.layers)).train()
    batch = ({"input_ids": torch.randint(0, 30000, (4, 32))}, torch.randint(0, 2, (4,)))
    graph = capture(model, batch[0])
    plan = Plan(compute={"*": INT8}).resolve(graph)
    kernels = prepare(copy.deepcopy(model), plan, graph=graph)
    variants = [Variant(model=model), Variant(model=kernels, plan=plan)]
    own = profile(variants, batch, loss, rounds=chosen.rounds, fit_casts=False)
    step = record_step(model, batch, loss, name="bert-base")
    del kernels, variants
    draw = random.Random(0)
    penalties = {op.name: {"int8": draw.expovariate(1.0)} for op in step.ops if op.name in plan.compute}
    profiles = {kind: slower(own, plain, low) for kind, (_, plain, low) in KINDS.items()}
    link = Link(latency_us=20, gbit_per_s=25)

    def machine(limits: dict[str, float]) -> OnCluster:
        cluster = Cluster.of({kind: count for kind, (count, _, _) in KINDS.items()}, link=link)
        devices = {k: d.model_copy(update={"memory_gb": limits.get(k)}) for k, d in cluster.devices.items()}
        return OnCluster(step, profiles, cluster.model_copy(update={"devices": devices}), penalties, {"int8": INT8})

    free = machine({})
    names = list(free.operators)
    needs = {f: free.memory("small", dict.fromkeys(names, f), free.batch) / 1e9 for f in (FLOAT, "int8")}
    between = {"small": (needs[FLOAT] + needs["int8"]) / 2, "old": 0.3 * needs[FLOAT] + 0.7 * needs["int8"]}
    rows = []
    for name, planner in PLANNERS.items():
        asked = machine(between)
        start = time.process_time()
        found = planner(asked)
        taken = time.process_time() - start
        rows.append(
            {"planner": name, "cpu_seconds": taken, "step_ms": 1e3 * found.seconds, "penalty": found.penalty}
            | {"low": dict(found.low), "batches": dict(found.batches)}
        )
        print(rows[-1], flush=True)
    lines = [
        "# How long planning takes: BERT-base on four kinds of device",
        "",
        f"{len(step.ops)} operators, {len(names)} of them in float or INT8; {sum(c for c, _, _ in KINDS.values())} "
        "devices; limits of memory on `small` and `old`. CPU seconds of one thread; bar 30.",
        "",
        "| planner | planning | step | suffers | operators in INT8 | batches |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        low = ", ".join(f"{kind} {count}" for kind, count in row["low"].items())
        sizes = ", ".join(f"{kind} {size}" for kind, size in row["batches"].items())
        lines.append(
            f"| {row['planner']} | {row['cpu_seconds']:.1f} s | {row['step_ms']:.0f} ms | {row['penalty']:.3g} "
            f"| {low} | {sizes} |"
        )
    save("plan_scale", {"environment": environment(), "rows": rows, "needs_gb": needs}, "\n".join(lines))


if __name__ == "__main__":
    main()
