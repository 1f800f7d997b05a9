"""How long planning takes: BERT-base (12 layers of 768) on a cluster with four kinds of device. Bar: 30 s.

    python benchmarks/plan_scale.py [--rounds 3]

One step in float and in INT8 is really profiled here. The other three kinds are this device with other speeds, in float
and in INT8, and two of them have too little memory for a float step. Penalties are random, by a seed: planning takes as
long whatever they are. Planners share what they ask the machine, as in `bitwright plan --cluster`, whose whole time is
taken, too: start, model, recording, all rows.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import environment, save
from torch import Tensor

from bitwright import Plan, Workload, capture, prepare
from bitwright.plan import ComputeSpec
from bitwright.planners import dynamic_batching, fastest, integer, recover, recover_and_split, uniform
from bitwright.planners.cluster import OnCluster
from bitwright.planners.machine import FLOAT
from bitwright.predict import Cluster, Link
from bitwright.profile import DeviceProfile, Variant, profile, record_step
from bitwright.profile.device import OperatorCost, Timing

INT8 = ComputeSpec(format="int8")  # as `--formats int8` has it
LAYERS = 12
#: Of each kind: how many there are, how slow it is in float, and in INT8.
KINDS = {"new": (2, 0.4, 0.35), "here": (4, 1.0, 1.0), "old": (4, 2.0, 1.4), "small": (2, 1.5, 1.2)}
PLANNERS = {
    "fastest": fastest,
    "recover": recover,
    "ilp": integer,
    "recover+split": recover_and_split,
    "batches": dynamic_batching,
    "all int8": lambda machine: uniform(machine, "int8"),
}


def loss(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits, target)


class Sentences:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        draw = torch.Generator().manual_seed(index)
        return {"input_ids": torch.randint(0, 30000, (32,), generator=draw)}, torch.tensor(index % 2)


def workload() -> Workload:
    """For the command."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(num_hidden_layers=LAYERS)).train()
    inputs = {"input_ids": torch.randint(0, 30000, (4, 32))}
    return Workload(name="bert-base", model=model, inputs=inputs, training=Sentences, loss=loss)


def command(profiles: dict[str, DeviceProfile], limits: dict[str, float], penalties: Any) -> dict[str, float]:
    """`bitwright plan --cluster` from its start to its end."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = ["bitwright_cluster: 1", "link: {latency_us: 20, gbit_per_s: 25}", "devices:"]
        for kind, own in profiles.items():
            own.save(folder / f"{kind}.json")
            limit = f", memory_gb: {limits[kind]}" if kind in limits else ""
            lines.append(f"  {kind}: {{profile: {kind}.json, count: {KINDS[kind][0]}{limit}}}")
        (folder / "cluster.yaml").write_text("\n".join(lines) + "\n")
        scores = {"bitwright-indications": 1, "indicator": "random", "samples": 1, "seconds": 0.0, "values": penalties}
        (folder / "indications.json").write_text(json.dumps(scores))
        asked = [sys.executable, "-m", "bitwright", "plan", f"{Path(__file__).resolve()}:workload", "--batch", "4"]
        asked += ["--cluster", "cluster.yaml", "--indications", "indications.json", "-o", "plan.yaml"]
        paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(asked, cwd=folder, check=True, env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"})
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return {"cpu_seconds": cpu, "wall_seconds": time.perf_counter() - start}


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
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    model = workload().model
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
    asked = machine(between)
    for name, planner in PLANNERS.items():
        start = time.process_time()
        found = planner(asked)
        taken = time.process_time() - start
        rows.append(
            {"planner": name, "cpu_seconds": taken, "step_ms": 1e3 * found.seconds, "penalty": found.penalty}
            | {"low": dict(found.low), "batches": dict(found.batches)}
        )
        print(rows[-1], flush=True)
    whole = command(profiles, between, penalties)
    print(whole, flush=True)
    lines = [
        "# How long planning takes: BERT-base on four kinds of device",
        "",
        f"{len(step.ops)} operators, {len(names)} of them in float or INT8; {sum(c for c, _, _ in KINDS.values())} "
        "devices; limits of memory on `small` and `old`. CPU seconds of one thread, one planner after the other, each "
        "with what those before it have asked; bar 30. "
        f"`bitwright plan --cluster`, from its start to its end, with all rows: {whole['cpu_seconds']:.1f} CPU seconds "
        f"({whole['wall_seconds']:.0f} s on a machine that others used, too).",
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
    save(
        "plan_scale",
        {"environment": environment(), "rows": rows, "command": whole, "needs_gb": needs},
        "\n".join(lines),
    )


if __name__ == "__main__":
    main()
