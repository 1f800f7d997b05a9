"""Training on two unequal machines, emulated here: step time and accuracy of five ways to plan.

    python benchmarks/unequal.py [--rounds 20] [--seeds 3] [--images 2560] [--epochs 3] [--part all|steps|accuracy]
    python benchmarks/unequal.py --part memory [--rounds 4] [--steps 4] [--memory-gb 1.6]

Two gloo processes on 127.0.0.1, each on a core of its own; the second has half of it (CPU quota, cgroup v1, as root)
and a limit of memory. Both measure a step in float and in INT8 under these limits; plans are made from that, and steps
of all plans are then timed in turns. Accuracy doesn't depend on speed: those runs have no limits. A VGG-style net on
CIFAR-10 (BITWRIGHT_DATA) at 16×16 pixels, from scratch, channels-last. Bars: planned takes at most 1.03 times as long
as uniform INT8 and is as accurate; planned with unequal batches is the fastest. This net needs as much memory in INT8
as in float; `--part memory` has another one, and a limit that float doesn't fit into (`unequal_memory.py`).
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Ranks, clean_up_on_signals, environment, save
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from bitwright import Plan, TrainConfig, Trainer, Workload, capture, prepare, score_operators
from bitwright.cluster import Cluster
from bitwright.cluster.cluster_cost_model import ClusterCostModel
from bitwright.cluster.cost_model import FLOAT
from bitwright.cluster.planners import Allocation, dynamic_batching, recover, recover_and_split, uniform
from bitwright.plan import ComputeSpec
from bitwright.profiling import DeviceProfile, StepSettings, Variant, halves, open_store, profile_variants, record_step
from bitwright.profiling.overhead import group_fact, measure_collectives, measure_group
from bitwright.profiling.profiled_step import TimedStep
from bitwright.profiling.step_timer import gc_disabled
from bitwright.training.distributed import leave_group
from bitwright.zoo.data import data_folder, npz_images

KINDS = ("fast", "slow")
BATCH, QUOTA, MEMORY_GB = 32, 0.5, 1.6
INT8 = ComputeSpec(format="int8")
KEPT = ("0.0", "9")  # stem and head stay float
COMPARED = {
    "float": lambda machine: uniform(machine, FLOAT),
    "uniform int8": lambda machine: uniform(machine, "int8"),
    "dynamic batching": dynamic_batching,
    "planned": recover,
    "planned + batches": recover_and_split,
}


def stage(channels: int, wider: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, wider, 3, padding=1, bias=False), nn.BatchNorm2d(wider), nn.ReLU())


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    body = [stage(3, 64), stage(64, 128), stage(128, 128), nn.MaxPool2d(2), stage(128, 256), stage(256, 256)]
    head = [nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10)]
    return nn.Sequential(*body, *head)


def images(file: str, count: int) -> tuple[Tensor, Tensor]:
    data = npz_images(data_folder() / "cifar10" / file).take(count, seed=0)
    found = [(F.avg_pool2d(x, 2), y) for x, y in data.batches(250, mean=(0.5,) * 3, std=(0.25,) * 3)]
    return torch.cat([x for x, _ in found]), torch.cat([y for _, y in found])


def workload(seed: int, count: int) -> Workload:
    tests = images("test.npz", 2000)
    training = images("train25k.npz", count)

    def evaluation() -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(tests[0].split(250), tests[1].split(250), strict=True)

    return Workload(
        name="vgg",
        model=net(seed),
        inputs=(tests[0][:1],),
        evaluation=evaluation,
        training=lambda: TensorDataset(*training),
        loss=F.cross_entropy,
    )


def last(model: nn.Module) -> nn.Module:
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


# -- steps ---------------------------------------------------------------------------------------------------------


def run_rank(rank: int, rounds: int, meeting: str, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    model = last(net(0)).train()
    x, y = images("train25k.npz", 256)
    x = x.contiguous(memory_format=torch.channels_last)
    batch = (x[:BATCH], y[:BATCH])
    graph = capture(model, x[:1])
    low = Plan(compute={"*": INT8, **{name: ComputeSpec() for name in KEPT}}).resolve(graph)
    kernels = prepare(copy.deepcopy(model), low, graph=graph)
    store = open_store(None, "wall")
    store.add({"facts": measure_group()})
    store.add({"facts": {group_fact("collectives"): [cost.model_dump() for cost in measure_collectives()]}})
    variants = [Variant(model=copy.deepcopy(model)), Variant(model=kernels, plan=low)]
    variants += [Variant(model=prepare(copy.deepcopy(model), p, graph=graph), plan=p) for p in halves(low)]
    half = (x[: BATCH // 2], y[: BATCH // 2])
    for size in (batch, half):
        own = profile_variants(variants, size, F.cross_entropy, store=store, rounds=rounds, fit_casts=False)
    busy = TimedStep(copy.deepcopy(model), [batch], F.cross_entropy, StepSettings())
    done = dist.barrier(async_op=True)
    while not done.is_completed():  # both share this machine's memory, so the other one has to be measured beside work
        busy()
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, own.to_json())
    found: list[Any] = [None]
    if rank == 0:
        pairs = list(zip(x.split(64), y.split(64), strict=True))[:2]
        penalties = score_operators(model, pairs, F.cross_entropy, formats=["int8"]).values
        profiles = dict(zip(KINDS, map(DeviceProfile.from_json, gathered), strict=True))
        cluster = Cluster.of(dict.fromkeys(KINDS, 1))
        slow = cluster.devices["slow"].model_copy(update={"memory_gb": MEMORY_GB})
        cluster = cluster.model_copy(update={"devices": {**cluster.devices, "slow": slow}})
        step = record_step(model, batch, F.cross_entropy, name="vgg")
        smaller = record_step(model, half, F.cross_entropy, name="vgg")
        machine = ClusterCostModel(
            step, profiles, cluster, penalties, {"int8": INT8}, keep_float=list(KEPT), smaller=smaller
        )
        made = {name: planner(machine) for name, planner in COMPARED.items()}
        found = [{name: (machine.to_plan(one).to_yaml(), facts(one)) for name, one in made.items()}]
    dist.broadcast_object_list(found, src=0)
    plans: dict[str, tuple[str, dict[str, Any]]] = found[0]
    steps = {name: ddp_step(model, Plan.from_yaml(text), KINDS[rank], x, y) for name, (text, _) in plans.items()}
    taken: dict[str, list[float]] = {name: [] for name in plans}
    with gc_disabled():
        for number in range(rounds + 2):
            for name, one in steps.items():
                dist.barrier()
                start = time.perf_counter()
                for _ in range(2):
                    one()
                if number >= 2:
                    taken[name].append((time.perf_counter() - start) / 2)
    medians = {name: statistics.median(values) for name, values in taken.items()}
    every: list[Any] = [None, None]
    dist.all_gather_object(every, medians)
    if rank == 0:
        rows = [
            {"way": name, "measured_ms": 1e3 * statistics.fmean(one[name] for one in every), "plan": text, **more}
            for name, (text, more) in plans.items()
        ]
        out.write_text(json.dumps(rows), encoding="utf-8")
    dist.barrier()
    leave_group()


def facts(one: Allocation) -> dict[str, Any]:
    return {
        "predicted_ms": 1e3 * one.seconds,
        "penalty": one.penalty,
        "low": dict(one.low),
        "batches": dict(one.batches),
        "memory": dict(one.memory),
    }


def ddp_step(model: nn.Module, plan: Plan, kind: str, x: Tensor, y: Tensor) -> TimedStep:
    own = copy.deepcopy(model)
    device = plan.devices[kind]
    section = plan.for_device(kind)
    if any(spec.is_low_precision for spec in section.compute.values()):
        prepare(own, section, inputs=x[:2])
    size = device.batch or BATCH
    shared = DistributedDataParallel(own, gradient_as_bucket_view=True)
    return TimedStep(own, [(x[:size], y[:size])], F.cross_entropy, StepSettings(), net=shared)


def measure_steps(rounds: int, limit: int) -> tuple[list[Any], str]:
    with tempfile.TemporaryDirectory() as folder, Ranks() as ranks:
        out, meeting = Path(folder) / "rows.json", Path(folder) / "meeting"
        cores = sorted(os.sched_getaffinity(0))
        for rank in range(2):
            command = [sys.executable, __file__, "--rounds", str(rounds), "--rank", str(rank)]
            command += ["--meeting", str(meeting), "--out", str(out)]
            slow = ranks.start(command, core=cores[rank % len(cores)])
        groups = ranks.limit(slow, cores=QUOTA, memory_gb=MEMORY_GB)
        codes = ranks.wait(limit)
        if any(codes) or None in codes:
            raise SystemExit(f"ranks ended with {codes}; None: not within {limit} s")
        set_ = ", ".join(group.parent.name for group in groups) or "nothing: no cgroups here"
        return json.loads(out.read_text(encoding="utf-8")), set_


# -- accuracy ------------------------------------------------------------------------------------------------------


def train_rank(plan: Path, seed: int, count: int, epochs: int, folder: Path) -> None:
    torch.set_num_threads(1)
    config = TrainConfig(epochs=epochs, batch=BATCH, lr=0.05, channels_last=True, seed=seed)
    text = Plan.load(plan)
    low = any(device.compute or device.batch for device in text.devices.values())
    kind = ",".join(KINDS) if low else None
    Trainer(
        workload(seed, count), compute=text if low else None, kind=kind, config=config, out=folder, resume=True
    ).fit()


def accuracy(rows: list[Any], seeds: int, count: int, epochs: int, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for row in rows:
        plan = folder / f"{row['way'].replace(' ', '-')}.yaml"
        plan.write_text(row["plan"], encoding="utf-8")
        row["top1"] = []
        for seed in range(seeds):
            out = folder / f"{plan.stem}-{seed}"
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
            command += ["--train", str(plan), "--seed", str(seed), "--images", str(count), "--epochs", str(epochs)]
            with Ranks() as ranks:
                code = ranks.start([*command, "--folder", str(out)]).wait()
            if code:
                raise SystemExit(f"{row['way']}, seed {seed}: training ended with {code}")
            row["top1"].append(json.loads((out / "result.json").read_text())["metrics"][-1]["top1"])
            print(row["way"], seed, row["top1"][-1], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help="20, or 4 with --part memory")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--images", type=int, default=2560)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--part", choices=["all", "steps", "accuracy", "memory"], default="all")
    parser.add_argument("--steps", type=int, default=4, help="with --part memory")
    parser.add_argument("--memory-gb", type=float, help="with --part memory; else a little less than float needs")
    parser.add_argument("--folder", type=Path, default=Path("unequal-runs"))
    parser.add_argument("--limit", type=int, default=1200, help="seconds after which ranks are ended")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.part == "memory":
        import unequal_memory  # which needs this module

        return unequal_memory.run(chosen.rounds or 4, chosen.steps, chosen.memory_gb, chosen.limit)
    chosen.rounds = chosen.rounds or 20
    if chosen.rank is not None:
        return run_rank(chosen.rank, chosen.rounds, chosen.meeting, chosen.out)
    if chosen.train is not None:
        return train_rank(chosen.train, chosen.seed, chosen.images, chosen.epochs, chosen.folder)
    clean_up_on_signals()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    kept = chosen.folder / "steps.json"
    if chosen.part != "accuracy":
        kept.write_text(json.dumps(measure_steps(chosen.rounds, chosen.limit)), encoding="utf-8")
    rows, how = json.loads(kept.read_text(encoding="utf-8"))
    if chosen.part != "steps":
        accuracy(rows, chosen.seeds, chosen.images, chosen.epochs, chosen.folder)
    base = next(row["measured_ms"] for row in rows if row["way"] == "uniform int8")
    lines = [
        "# Two unequal machines: five ways to train",
        "",
        f"The slow one has {QUOTA:g} of a core and {MEMORY_GB:g} GB (limits set: {how}). A step has {2 * BATCH} "
        f"samples. Wall time, medians of {chosen.rounds} rounds of two steps, in turns; accuracy of 2,000 test images "
        f"after {chosen.epochs} epochs of {chosen.images:,}, from scratch.",
        "",
        "| way | step | of uniform INT8 | predicted | error | INT8 operators | batches | penalty | top-1 | seeds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        low = ", ".join(f"{kind} {count}" for kind, count in row["low"].items())
        sizes = ", ".join(f"{kind} {size}" for kind, size in row["batches"].items())
        top = row.get("top1", [])
        spread = statistics.stdev(top) if len(top) > 1 else 0.0
        score = f"{statistics.fmean(top):.2f} ± {spread:.2f} | {', '.join(f'{t:.2f}' for t in top)}" if top else " | "
        error = 100 * (row["predicted_ms"] / row["measured_ms"] - 1)
        lines.append(
            f"| {row['way']} | {row['measured_ms']:.0f} ms | {row['measured_ms'] / base:.2f} "
            f"| {row['predicted_ms']:.0f} ms | {error:+.1f} % | {low} | {sizes} | {row['penalty']:.3g} | {score} |"
        )
    save("unequal", {"environment": environment(), "rows": rows, "limits": how}, "\n".join(lines))
    return None


if __name__ == "__main__":
    main()
