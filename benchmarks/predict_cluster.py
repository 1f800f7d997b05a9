"""How well steps of several unequal processes are predicted: gloo on 127.0.0.1, one rank with a part of a core.

    python benchmarks/predict_cluster.py [--rounds 30] [--worlds 2 3] [--quota 0.5] [--link 200]

Each rank profiles its own steps (watched) in turns with steps of DDP; rank 0 predicts the cluster's step from all
profiles, and again with parts of the model left out. The last rank is slowed by a CPU quota (cgroup v1, as root). More
ranks than cores have quotas, too, so that what shares a core fits in: they stand for machines, which don't take time
from each other. Where quotas can't be had, the last rank shares a core with a process that only computes.

ResNet-20 in float and INT8 (simulated), and a wide perceptron whose 25 MB of gradients take a good part of the step. On
loopback messages are work of the same cores, which can't be hidden behind other work; so ResNet-20 is also run on a
slow link (a network namespace of its own, tc).
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Ranks, clean_up_on_signals, environment, save, whole
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bitwright.cluster import Cluster, Modelled, predict_step
from bitwright.plan import Plan
from bitwright.profiling import DeviceProfile, StepSettings, Variant, open_store, record_step
from bitwright.profiling.microbenchmarks import measure_tensors
from bitwright.profiling.overhead import Collectives, group_fact, measure_group, measure_host
from bitwright.profiling.profiled_step import CLOCKS, TimedStep
from bitwright.profiling.profiler import assemble, pauses
from bitwright.profiling.step_timer import StepTimer, gc_disabled, timer_overhead
from bitwright.training import Qat
from bitwright.training.distributed import leave_group
from bitwright.zoo import ResNet20

ABLATIONS = {
    "whole": Modelled(),
    "without casts": Modelled(casts=False),
    "without overlap": Modelled(overlap=False),
    "without contention": Modelled(contention=False),
}
BATCH, CAP_MB = 32, 0.25


Case = tuple[Variant, tuple[Any, Any], Any]


def wide() -> nn.Module:
    return nn.Sequential(
        *(layer for _ in range(6) for layer in (nn.Linear(1024, 1024), nn.ReLU())), nn.Linear(1024, 10)
    )


def cases() -> dict[str, Case]:
    torch.manual_seed(0)
    images, labels = torch.randn(BATCH, 3, 32, 32), torch.randint(0, 10, (BATCH,))
    settings = StepSettings(bucket_cap_mb=CAP_MB)
    quantized = ResNet20()
    qat = Qat(quantized, [images], precision="int8", example=images)
    rows = (torch.randn(BATCH, 1024), labels)
    return {
        "resnet20, float": (Variant(model=ResNet20().train(), settings=settings), (images, labels), ResNet20()),
        "resnet20, int8": (
            Variant(model=quantized.train(), plan=qat.plan, settings=settings),
            (images, labels),
            ResNet20(),
        ),
        "wide, float": (Variant(model=wide().train(), settings=StepSettings(bucket_cap_mb=4)), rows, wide()),
    }


def run_rank(rank: int, world: int, rounds: int, store_file: str, out: Path, chosen: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store_file}", rank=rank, world_size=world)
    found = {name: case for name, case in cases().items() if not chosen or name.startswith(tuple(chosen))}
    read = CLOCKS["wall"]
    store = open_store(None, "wall")
    host = measure_host("wall")
    store.add({"facts": {"host": host.model_dump()}})
    store.add({"facts": measure_group()})
    own = {n: TimedStep(v.model, [batch], F.cross_entropy, v.settings) for n, (v, batch, _) in found.items()}
    watches = {n: StepTimer(v.model, v.plan, v.settings, read, host=host) for n, (v, _, _) in found.items()}
    shared = {}
    for name, (variant, batch, _) in found.items():
        model, cap = copy.deepcopy(variant.model), variant.settings.bucket_cap_mb
        net = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=cap)
        shared[name] = TimedStep(model, [batch], F.cross_entropy, variant.settings, net=net)
    taken: dict[str, list[float]] = {name: [] for name in found}
    parts: dict[str, list[dict[str, float]]] = {name: [] for name in found}
    group = Collectives()
    with gc_disabled():
        for number in range(rounds + 3):
            for name in found:
                dist.barrier()
                alone = own[name]()  # a quota that wasn't used while waiting is used up by now
                sample = watches[name].run(own[name])
                dist.barrier()
                if name == next(iter(found)):
                    group.round()
                start = time.perf_counter()
                for _ in range(2):
                    shared[name]()
                spent = (time.perf_counter() - start) / 2
                if number >= 3:
                    overhead = None if pauses("wall") else timer_overhead(watches[name], sample, alone)
                    store.add_round(sample, wanted=2 * rounds, overhead=overhead)
                    taken[name].append(spent)
                    parts[name].append(alone)
    store.add({"facts": {group_fact("collectives"): [cost.model_dump() for cost in group.costs()]}})
    store.add({"facts": {"tensors": [cost.model_dump() for cost in measure_tensors("wall", rounds=5)]}})
    buckets = {n: step.net._get_ddp_logging_data()["rebuilt_bucket_sizes"] for n, step in shared.items()}
    local = {n: {part: statistics.median(one[part] for one in all_) for part in all_[0]} for n, all_ in parts.items()}
    mine = (assemble(store, "wall").to_json(), {n: statistics.median(t) for n, t in taken.items()}, local)
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, mine)
    if rank == 0:
        rows = judge(found, gathered, world, buckets)
        out.write_text(json.dumps(rows), encoding="utf-8")
    dist.barrier()
    leave_group()


def judge(found: dict[str, Case], gathered: list[Any], world: int, buckets: Any) -> list[Any]:
    profiles = {f"rank{i}": DeviceProfile.from_json(text) for i, (text, _, _) in enumerate(gathered)}
    cluster = Cluster.of(dict.fromkeys(profiles, 1))
    rows = []
    for name, (variant, batch, model) in found.items():
        graph = record_step(model, batch, F.cross_entropy, name=name)
        measured = statistics.fmean(times[name] for _, times, _ in gathered)
        ours = predict_step(graph, variant.plan, profiles, cluster, variant.settings).buckets
        if ", ".join(map(str, ours)) != buckets[name]:
            raise SystemExit(f"{name}: buckets of {ours} bytes, but DDP's have {buckets[name]}")
        for words, modelled in ABLATIONS.items():
            plan: Plan = variant.plan
            made = predict_step(graph, plan, profiles, cluster, variant.settings, modelled=modelled)
            rows.append(
                {
                    "world": world,
                    "plan": name,
                    "model": words,
                    "predicted_ms": 1e3 * made.seconds,
                    "measured_ms": 1e3 * measured,
                    "error_percent": 100 * (made.seconds / measured - 1),
                    "alone_ms": [1e3 * local.seconds for local in made.locals.values()],
                    "alone_parts": [_parts(local) for local in made.locals.values()],
                    "alone_measured": [local[name] for _, _, local in gathered],
                    "collectives": [[c.model_dump() for c in profile.collectives] for profile in profiles.values()],
                    "collectives_ms": [1e3 * (sent.end - sent.start) for sent in made.replay.sent],
                    "contention": [profile.host.contention for profile in profiles.values()],
                    "stretch": [profile.host.stretch for profile in profiles.values()],
                    "buckets": list(made.buckets),
                    "ddp_buckets": buckets[name],
                    "waits": [device.waiting for device in made.devices],
                }
            )
    return rows


def _parts(local: Any) -> dict[str, float]:
    return {"forward": local.forward_seconds, "backward": local.backward_seconds, **local.tail}


def shares(world: int, cores: int, quota: float) -> list[float]:
    """Of a core, for each rank: whole ones and `quota` where there are enough cores, else less in the same ratio."""
    wanted = [1.0] * (world - 1) + [quota]
    fullest = max(sum(wanted[core::cores]) for core in range(cores))
    return [round(share / max(1.0, fullest), 2) for share in wanted]


@contextmanager
def slow_link(mbit: int) -> Iterator[list[str]]:
    """A namespace whose loopback carries so much; what a command has to begin with to be in it."""
    if not mbit:
        yield []
        return
    name = f"bitwright-{os.getpid()}"

    def run(*command: str) -> None:
        subprocess.run(command, check=True, start_new_session=True)

    with whole():
        run("ip", "netns", "add", name)
    try:
        inside = ["ip", "netns", "exec", name]
        run(*inside, "ip", "link", "set", "lo", "up", "mtu", "1500")
        rate = ["rate", f"{mbit}mbit", "burst", "32kb", "latency", "400ms"]
        run(*inside, "tc", "qdisc", "add", "dev", "lo", "root", "tbf", *rate)
        yield inside
    finally:
        with whole():
            run("ip", "netns", "delete", name)


def run_world(
    world: int, rounds: int, quota: float, limit: int, cases: list[str], link: int = 0
) -> tuple[list[Any], str]:
    with tempfile.TemporaryDirectory() as folder, slow_link(link) as inside, Ranks() as ranks:
        out, meeting = Path(folder) / "rows.json", Path(folder) / "meeting"
        command = [*inside, sys.executable, __file__, "--rounds", str(rounds), "--world", str(world)]
        command += ["--out", str(out), "--meeting", str(meeting), "--cases", *cases]
        cores = sorted(os.sched_getaffinity(0))
        groups = []
        for rank, share in enumerate(shares(world, len(cores), quota)):
            core = cores[rank % len(cores)]
            process = ranks.start([*command, "--rank", str(rank)], core=core, GLOO_SOCKET_IFNAME="lo")
            if share < 1:
                groups += ranks.limit(process, cores=share)
        with Ranks() as shares_input_with:
            if not groups:
                busy = f"import time; e=time.time()+{limit}\nwhile time.time()<e: pass"
                shares_input_with.start([sys.executable, "-c", busy], core=core)
            codes = ranks.wait(limit)
        if any(codes) or None in codes:
            raise SystemExit(f"ranks ended with {codes}; None: not within {limit} s")
        given = ", ".join(f"{share:g}" for share in shares(world, len(cores), quota))
        how = (
            f"{world} ranks have {given} of a core" if groups else f"the last of {world} shares a core with other work"
        )
        rows = json.loads(out.read_text(encoding="utf-8"))
        return [{**row, "link_mbit": link or None} for row in rows], how


def ranks_of(row: dict[str, Any]) -> str:
    return f"{row['world']}, {row['link_mbit']} Mbit/s" if row["link_mbit"] else str(row["world"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--worlds", type=int, nargs="*", default=[2, 3])
    parser.add_argument("--cases", nargs="*", default=[], help="beginnings of names: resnet20, wide")
    parser.add_argument("--name", default="predict_cluster", help="of the result's files")
    parser.add_argument("--quota", type=float, default=0.5)
    parser.add_argument("--link", type=int, default=200, help="Mbit/s of the slow link; 0: without it")
    parser.add_argument("--limit", type=int, default=1500, help="seconds after which ranks are ended")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--world", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.rank is not None:
        run_rank(chosen.rank, chosen.world, chosen.rounds, chosen.meeting, chosen.out, chosen.cases)
        return
    clean_up_on_signals()
    rows: list[Any] = []
    how = []
    runs = [(world, chosen.cases, 0) for world in chosen.worlds]
    if chosen.link and os.geteuid() == 0 and shutil.which("tc") and shutil.which("ip"):
        runs.append((2, ["resnet20"], chosen.link))
    elif chosen.link:
        print("no slow link: it needs root, ip and tc")
    for world, cases_, link in runs:
        made, words = run_world(world, chosen.rounds, chosen.quota, chosen.limit, cases_, link)
        rows += made
        if words not in how:
            how.append(words)
    lines = ["| ranks | plan | model | predicted | measured | error |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {ranks_of(r)} | {r['plan']} | {r['model']} | {r['predicted_ms']:.1f} ms | {r['measured_ms']:.1f} ms "
        f"| {r['error_percent']:+.1f} % |"
        for r in rows
    ]
    words = (
        f"{'; '.join(how)}. Bar 10 %, goal 5 %; wall time, medians of {chosen.rounds} rounds of two steps, in turns."
    )
    data = {"environment": environment(rounds=chosen.rounds, quota=chosen.quota), "rows": rows}
    save(chosen.name, data, "\n".join(["# Steps of unequal processes", "", words, "", *lines]))


if __name__ == "__main__":
    main()
