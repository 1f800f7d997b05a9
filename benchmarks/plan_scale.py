"""How long planning takes: BERT-base (12 layers of 768) on a cluster with four kinds of device. Bar: 30 s.

    python benchmarks/plan_scale.py [--rounds 3]

One step in float and in INT8 is really profiled here. The other three kinds are this device with other speeds, in float
and in INT8. Two of them have less memory than a float step needs, and than the plan that would be chosen if there were
enough: half-way from that to uniform INT8, which is slow there. It is checked that these limits bind; with few tokens
they couldn't, as INT8 brings torch's compiler into the process, which needs more than codes save. Penalties are random,
by a seed: planning takes as long whatever they are. Planners share what they ask the machine, as in `bitwright plan
--cluster`, whose whole time is taken, too: start, model, recording (two real steps), all rows.
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
from bitwright.cluster import Cluster, Link
from bitwright.cluster.cluster_cost_model import ClusterCostModel
from bitwright.cluster.cost_model import FLOAT
from bitwright.cluster.memory import RESERVE, size
from bitwright.cluster.planners import dynamic_batching, fastest, integer, recover, recover_and_split, uniform
from bitwright.plan import ComputeSpec
from bitwright.profiling import DeviceProfile, Variant, profile_variants, record_step
from bitwright.profiling.device_profile import OperatorCost, OperatorTime

INT8 = ComputeSpec(format="int8")  # as `--formats int8` has it
LAYERS, BATCH, LENGTH = 12, 8, 128
#: Of each kind: how many there are, how slow it is in float, and in INT8. Two have no instructions for 8-bit products:
#: they would take float, if they had memory for it.
KINDS = {"new": (2, 0.4, 1.2), "here": (4, 1.0, 1.0), "old": (4, 2.0, 1.4), "small": (2, 1.5, 4.5)}
TIGHT = ("new", "small")
PLANNERS = {
    "fastest": fastest,
    "recover": recover,
    "ilp": integer,
    "recover+split": recover_and_split,
    "batches": dynamic_batching,
    "all int8": lambda cost_model: uniform(cost_model, "int8"),
}


def loss(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits, target)


class Sentences:
    def __len__(self) -> int:
        return BATCH

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        draw = torch.Generator().manual_seed(index)
        return {"input_ids": torch.randint(0, 30000, (LENGTH,), generator=draw)}, torch.tensor(index % 2)


def workload() -> Workload:
    """For the command."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(num_hidden_layers=LAYERS)).train()
    inputs = {"input_ids": torch.randint(0, 30000, (1, LENGTH))}
    return Workload(name="bert-base", model=model, inputs=inputs, training=Sentences, loss=loss)


def command(profiles: dict[str, DeviceProfile], limits: dict[str, float], penalties: Any) -> dict[str, float]:
    """`bitwright plan-cluster` from its start to its end."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = ["bitwright_cluster: 1", "link: {latency_us: 20, gbit_per_s: 25}", "devices:"]
        for kind, own in profiles.items():
            own.save(folder / f"{kind}.json")
            limit = f", memory_gb: {limits[kind]}" if kind in limits else ""
            lines.append(f"  {kind}: {{profile: {kind}.json, count: {KINDS[kind][0]}{limit}}}")
        (folder / "cluster.yaml").write_text("\n".join(lines) + "\n")
        scores = {
            "bitwright-operator-scores": 1,
            "indicator": "random",
            "samples": 1,
            "seconds": 0.0,
            "values": penalties,
        }
        (folder / "scores.json").write_text(json.dumps(scores))
        asked = [
            sys.executable,
            "-m",
            "bitwright",
            "plan-cluster",
            f"{Path(__file__).resolve()}:workload",
            "--batch",
            str(BATCH),
        ]
        asked += ["--cluster", "cluster.yaml", "--scores", "scores.json", "-o", "plan.yaml"]
        paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(asked, cwd=folder, check=True, env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"})
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return {"cpu_seconds": cpu, "wall_seconds": time.perf_counter() - start}


def slower(own: DeviceProfile, plain: float, low: float) -> DeviceProfile:
    def scaled(timing: OperatorTime | None, factor: float) -> OperatorTime | None:
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


def binding(free: ClusterCostModel) -> tuple[dict[str, dict[str, int]], dict[str, float]]:
    """Bytes that kinds need without limits, and gigabytes with which planners have to choose smaller plans."""
    chosen = recover(free)
    needs, limits = {}, {}
    for kind in TIGHT:
        uniforms = {f: free.memory(kind, dict.fromkeys(free.operators, f), free.batch) for f in (FLOAT, "int8")}
        needs[kind] = {**uniforms, "free": chosen.memory[kind]}
        usable = (min(needs[kind][FLOAT], needs[kind]["free"]) + needs[kind]["int8"]) // 2
        limits[kind] = usable / (1 - RESERVE) / 1e9
    return needs, limits


def check(asked: ClusterCostModel, needs: dict[str, dict[str, int]]) -> None:
    """Limits that don't bind would show nothing."""
    for kind, own in needs.items():
        limit = asked.limit(kind)
        assert limit is not None
        if not own["int8"] <= limit < min(own[FLOAT], own["free"]):
            raise SystemExit(
                f"the limit of {kind} doesn't bind: it may use {size(limit)}; float needs {size(own[FLOAT])}, the plan "
                f"without a limit {size(own['free'])}, uniform INT8 {size(own['int8'])}. More tokens in a step "
                "(LENGTH, BATCH) let INT8 save more than torch's compiler needs"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    model = workload().model
    batch = ({"input_ids": torch.randint(0, 30000, (BATCH, LENGTH))}, torch.randint(0, 2, (BATCH,)))
    graph = capture(model, {"input_ids": batch[0]["input_ids"][:1]})
    plan = Plan(compute={"*": INT8}).resolve(graph)
    kernels = prepare(copy.deepcopy(model), plan, graph=graph)
    variants = [Variant(model=model), Variant(model=kernels, plan=plan)]
    own = profile_variants(variants, batch, loss, rounds=chosen.rounds, fit_casts=False)
    step = record_step(model, batch, loss, name="bert-base")
    del kernels, variants
    draw = random.Random(0)
    penalties = {op.name: {"int8": draw.expovariate(1.0)} for op in step.ops if op.name in plan.compute}
    profiles = {kind: slower(own, plain, low) for kind, (_, plain, low) in KINDS.items()}
    link = Link(latency_us=20, gbit_per_s=25)

    def cost_model(limits: dict[str, float]) -> ClusterCostModel:
        cluster = Cluster.of({kind: count for kind, (count, _, _) in KINDS.items()}, link=link)
        devices = {k: d.model_copy(update={"memory_gb": limits.get(k)}) for k, d in cluster.devices.items()}
        cluster = cluster.model_copy(update={"devices": devices})
        return ClusterCostModel(step, profiles, cluster, penalties, {"int8": INT8})

    free = cost_model({})
    names = list(free.operators)
    needs, between = binding(free)
    print(needs, between, flush=True)
    rows = []
    asked = cost_model(between)
    check(asked, needs)
    for name, planner in PLANNERS.items():
        start = time.process_time()
        found = planner(asked)
        taken = time.process_time() - start
        rows.append(
            {"planner": name, "cpu_seconds": taken, "step_ms": 1e3 * found.seconds, "penalty": found.penalty}
            | {"low": dict(found.low), "batches": dict(found.batches), "memory": dict(found.memory)}
        )
        print(rows[-1], flush=True)
    whole = command(profiles, between, penalties)
    print(whole, flush=True)
    told = "; ".join(
        f"`{kind}` may use {asked.memory_limit(kind)}, float needs {size(needs[kind][FLOAT])}, the plan without a "
        f"limit {size(needs[kind]['free'])}, uniform INT8 {size(needs[kind]['int8'])}"
        for kind in TIGHT
    )
    lines = [
        "# How long planning takes: BERT-base on four kinds of device",
        "",
        f"{len(step.ops)} operators, {len(names)} of them in float or INT8; {sum(c for c, _, _ in KINDS.values())} "
        f"devices; {BATCH} × {LENGTH} tokens each. Limits of memory bind on two kinds: {told}. "
        "CPU seconds of one thread, one planner after the other, each "
        "with what those before it have asked; bar 30. "
        f"`bitwright plan-cluster`, from its start to its end, with all rows: {whole['cpu_seconds']:.1f} CPU seconds "
        f"({whole['wall_seconds']:.0f} s on a machine that others used, too).",
        "",
        "| planner | planning | step | penalty | operators in INT8 | batches | of the limits |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        low = ", ".join(f"{kind} {count}" for kind, count in row["low"].items())
        sizes = ", ".join(f"{kind} {size}" for kind, size in row["batches"].items())
        used = ", ".join(f"{kind} {100 * row['memory'][kind] / (asked.limit(kind) or 1):.1f} %" for kind in TIGHT)
        lines.append(
            f"| {row['planner']} | {row['cpu_seconds']:.1f} s | {row['step_ms']:.0f} ms | {row['penalty']:.3g} "
            f"| {low} | {sizes} | {used} |"
        )
    save(
        "plan_scale",
        {"environment": environment(), "rows": rows, "command": whole, "needs": needs, "memory_gb": between},
        "\n".join(lines),
    )


if __name__ == "__main__":
    main()
