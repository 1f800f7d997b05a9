"""Adaptive training on two emulated machines, one of which loses half of its CPU for a while.

    python benchmarks/adaptive.py [--part all|steps|overhead] [--seeds 3] [--quota 0.4] [--steps 200]

Two gloo processes on 127.0.0.1 train a small convolutional net on scikit-learn's digits; each has a CPU quota (cgroup
v1, as root). At step 50 the second one gets half of its quota, at step 150 all of it again. For each seed the same is
done without adaptation. Static plans for the state in between are timed with the lower quota from the beginning.
Bars: the mean step over steps 60 to 150 is within 10 % of the best static plan for that state, after step 160 within
5 % of the original plan, and at least 1.25 times as fast as without adaptation; accuracy is equal within the spread of
seeds. `--part overhead` compares the CPU time of steps with and without measurement; the bar is 0.5 %.
Killed ranks: `tests/support/elastic.py`.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import Ranks, clean_up_on_signals, environment, save
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from bitwright import (
    Cluster,
    ClusterReplanner,
    DeviceProfile,
    Plan,
    TrainConfig,
    Trainer,
    Workload,
    profile,
    score_operators,
)
from bitwright.cluster import Link
from bitwright.plan import Device
from bitwright.profiling import StepSettings
from bitwright.profiling.profiled_step import make_optimizer
from bitwright.training import Callback
from bitwright.training.distributed import SingleProcess
from bitwright.training.step import MeasuredStep, TrainingStep
from bitwright.zoo.workloads import digits_split

BATCH, LIMITED, SLOWER, RESTORED = 32, 5, 50, 150
KINDS = "first,second"
SETTLED = 10  # steps after a change that don't count


def workload(seed: int) -> Workload:
    split = digits_split()
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for before, after in ((1, 64), (64, 64), (64, 64), (64, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))

    def evaluation() -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(split.test_images.split(100), split.test_labels.split(100), strict=True)

    return Workload(
        name="digits",
        model=model,
        inputs=(split.train_images[:1],),
        evaluation=evaluation,
        training=lambda: TensorDataset(split.train_images, split.train_labels),
        loss=F.cross_entropy,
    )


class Watch(Callback):
    """Writes the time of each step."""

    def __init__(self, path: Path) -> None:
        self.path, self.times = path, [time.perf_counter()]
        self.facts: dict[str, Any] = {}

    def on_step(self, run: Any) -> None:
        self.times.append(time.perf_counter())
        self.path.write_text(str(run.step), encoding="ascii")

    def on_end(self, run: Any) -> None:
        if run.adaptation is not None:
            self.facts = run.adaptation.facts()


def run_rank(folder: Path, rank: int, plans: Sequence[str], seed: int, steps: int) -> None:
    """Train with each plan in turn; "adaptive" plans by itself."""
    torch.set_num_threads(1)
    found = []
    per_epoch = -(-len(digits_split().train_labels) // (2 * BATCH))
    for number, name in enumerate(plans):
        work = workload(seed)
        config = TrainConfig(epochs=-(-steps // per_epoch), batch=BATCH, lr=0.05, seed=seed, log_steps=1000)
        watch = Watch(folder / f"step-{number}")
        common: dict[str, Any] = {"config": config, "kind": KINDS, "callbacks": [watch], "device": "cpu"}
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
        if name == "adaptive":
            device = DeviceProfile.load(folder / "profile.json")
            scores = json.loads((folder / "scores.json").read_text(encoding="utf-8"))
            profiles = dict.fromkeys(KINDS.split(","), device)
            cluster = Cluster.of(dict.fromkeys(profiles, 1), link=Link(latency_us=100, gbit_per_s=10))
            result = Trainer(work, adaptive=ClusterReplanner(cluster, scores, profiles=profiles), **common).fit()
        else:
            result = Trainer(work, compute=Plan.from_yaml(name), **common).fit()
        times = [b - a for a, b in zip(watch.times, watch.times[1:], strict=False)]
        found.append(
            {"times": times, "top1": result.metrics[-1]["top1"], "notes": result.notes, "adaptive": watch.facts}
        )
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")


def train(
    folder: Path, plans: Sequence[str], seed: int, steps: int, quota: float, *, events: bool, limit: int
) -> list[dict[str, Any]]:
    """Train on two processes; with `events` the quota of the second one changes, else it is low throughout."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "plans.json").write_text(json.dumps(plans), encoding="utf-8")
    for old in folder.glob("step-*"):
        old.unlink()
    with Ranks() as ranks:
        for rank in range(2):
            command = [sys.executable, __file__, "--rank", str(rank), "--folder", str(folder)]
            command += ["--seed", str(seed), "--steps", str(steps)]
            more = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
            ranks.start(command, MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", **more)
        groups: list[Path] = []
        period = max(20_000, int(2_000 / quota))  # the smallest quota is 1 ms

        def reached(step: int) -> None:
            until = time.monotonic() + limit
            while _step(folder / "step-0") < step:
                if time.monotonic() > until or any(process.poll() is not None for process in ranks.processes):
                    raise SystemExit(f"the ranks don't reach step {step}")
                time.sleep(0.02)

        reached(LIMITED)
        for number, process in enumerate(ranks.processes):
            share = quota if events or number == 0 else quota / 2
            groups += ranks.limit(process, cores=share, period=period)
        if len(groups) < 2:
            raise SystemExit("this benchmark needs CPU quotas (cgroup v1, as root)")
        if events:
            for step, share in ((SLOWER, quota / 2), (RESTORED, quota)):
                reached(step)
                (groups[1] / "cpu.cfs_quota_us").write_text(str(int(period * share)), encoding="ascii")
        codes = ranks.wait(limit)
        if any(codes) or None in codes:
            raise SystemExit(f"ranks ended with {codes}; None: not within {limit} s")
    found: list[dict[str, Any]] = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    return found


def _step(path: Path) -> int:
    try:
        return int(path.read_text(encoding="ascii") or 0)
    except FileNotFoundError:
        return 0


def split(first: int, second: int) -> str:
    devices = {name: Device(batch=batch) for name, batch in zip(KINDS.split(","), (first, second), strict=True)}
    return Plan(devices=devices).to_yaml()


def measure_profile(folder: Path, rounds: int) -> None:
    """A profile of this machine without quotas; adaptive runs find the factor by themselves."""
    torch.set_num_threads(1)
    work = workload(0)
    options: dict[str, Any] = {"rounds": rounds, "fit_casts": False, "cache": folder / "samples.jsonl"}
    profile(work, kernels=["int8"], batch=BATCH, half_batch=True, **options).save(folder / "profile.json")
    split_ = digits_split()
    pairs = list(zip(split_.train_images.split(64), split_.train_labels.split(64), strict=True))[:2]
    scores = score_operators(work.model, pairs, F.cross_entropy, formats=["int8"]).values
    (folder / "scores.json").write_text(json.dumps(scores), encoding="utf-8")


def measure_steps(seeds: int, quota: float, steps: int, rounds: int, limit: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        measure_profile(folder, rounds)
        rows = []
        for seed in range(seeds):
            adaptive = train(folder, ["adaptive"], seed, steps, quota, events=True, limit=limit)[0]
            switches = adaptive["adaptive"]["switches"]
            print(seed, [(one["step"], one["batches"], one["low"]) for one in switches], flush=True)
            still = train(folder, [split(BATCH, BATCH)], seed, steps, quota, events=True, limit=limit)[0]
            rows.append({"seed": seed, "adaptive": adaptive, "still": still})
        # static plans for the state in between, in turns
        lower = [split(2 * BATCH - batch, batch) for batch in (32, 26, 23, 21, 19, 16)]
        statics = train(folder, [*lower, *lower], 0, 40, quota, events=False, limit=limit)
        means = [
            statistics.fmean(time for one in (statics[i], statics[i + len(lower)]) for time in one["times"][SETTLED:])
            for i in range(len(lower))
        ]
        return {"rows": rows, "statics": dict(zip(lower, means, strict=True))}


def between(times: Sequence[float], first: int, last: int) -> float:
    return statistics.fmean(times[first:last])


def overhead(rounds: int) -> dict[str, float]:
    """CPU time that measurement adds to a step, in turns with steps that aren't measured.

    The added time doesn't depend on the model, except for its number of parameters in the first step. It is taken from
    a model of one parameter, because it is smaller than the noise of a real step.
    """
    torch.set_num_threads(1)
    split_ = digits_split()
    small, real = nn.Linear(1, 1, bias=False), workload(0).model
    batches = {
        id(small): (torch.zeros(2, 1), torch.zeros(2, 1)),
        id(real): (split_.train_images[:BATCH], split_.train_labels[:BATCH]),
    }
    steps: dict[str, tuple[TrainingStep, Any]] = {}
    for name, kind, model in (
        ("plain", TrainingStep, small),
        ("measured", MeasuredStep, small),
        ("step", TrainingStep, real),
    ):
        own = copy.deepcopy(model)
        loss = F.cross_entropy if model is real else F.mse_loss
        optimizer = make_optimizer(list(own.parameters()), StepSettings())
        made = kind(SingleProcess(own), lambda out, _, target, loss=loss: loss(out, target), optimizer)
        steps[name] = made, batches[id(model)]
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 5):
        for name, (step, (x, y)) in steps.items():
            if name == "step" and number > 30:
                continue
            begun = time.process_time()
            step.run([(x, y, 1.0)], 1)
            if number >= 5:
                taken[name].append(time.process_time() - begun)
    medians = {name: statistics.median(values) for name, values in taken.items()}
    added = medians["measured"] - medians["plain"]
    return {**medians, "added": added, "share": added / medians["step"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["all", "steps", "overhead"], default="all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quota", type=float, default=0.4, help="of a core, for each process")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=10, help="of the profile")
    parser.add_argument("--limit", type=int, default=1200, help="seconds after which ranks are ended")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.rank is not None:
        plans = json.loads((chosen.folder / "plans.json").read_text(encoding="utf-8"))
        return run_rank(chosen.folder, chosen.rank, plans, chosen.seed, chosen.steps)
    clean_up_on_signals()
    data: dict[str, Any] = {"environment": environment()}
    lines = ["# Adaptive training on two machines", ""]
    if chosen.part != "steps":
        data["overhead"] = cost = overhead(1000)
        lines += [
            f"Measurement adds {1e6 * cost['added']:.1f} µs of CPU time to a step (medians of 1,000 steps of a tiny "
            f"model, in turns), {100 * cost['share']:.2f} % of a step of this net ({1e3 * cost['step']:.1f} ms).",
            "",
        ]
    if chosen.part != "overhead":
        found = measure_steps(chosen.seeds, chosen.quota, chosen.steps, chosen.rounds, chosen.limit)
        data["steps"] = found
        best = min(found["statics"].values())
        lines += [
            f"Each process has {chosen.quota:g} of a core. The second one has half of that from step {SLOWER} to "
            f"{RESTORED}. The best of {len(found['statics'])} static splits for that state takes {1e3 * best:.0f} ms.",
            "",
            "| seed | first 50 steps | steps 60 to 150 | of the best static plan | without adaptation | gain "
            "| after step 160 | of the first steps | switches (step: batches) | top-1 | static top-1 |",
            "|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        for row in found["rows"]:
            times, still = row["adaptive"]["times"], row["still"]["times"]
            first, slow, last = between(still, 15, 50), between(times, 60, 150), between(times, 160, chosen.steps)
            without = between(still, 60, 150)
            switches = "; ".join(
                f"{one['step']}: {', '.join(map(str, one['batches']))}"
                for one in row["adaptive"]["adaptive"]["switches"]
            )
            lines.append(
                f"| {row['seed']} | {1e3 * first:.0f} ms | {1e3 * slow:.0f} ms | {slow / best:.2f} | "
                f"{1e3 * without:.0f} ms | {without / slow:.2f} | {1e3 * last:.0f} ms | {last / first:.2f} | "
                f"{switches} | {row['adaptive']['top1']:.2f} | {row['still']['top1']:.2f} |"
            )
    save("adaptive" if chosen.part == "all" else f"adaptive_{chosen.part}", data, "\n".join(lines))
    return None


if __name__ == "__main__":
    main()
