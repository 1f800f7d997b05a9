"""Kill ranks and machines of real adaptive runs at random steps, and compare with manual restarts.

    python tests/support/elastic.py --kills 20 --markdown benchmarks/results/rank_kills.md

Machines are agents of torchrun (`--nnodes 1:3`) on 127.0.0.1; the rendezvous is in this process, so that any of them
may die. A killed rank is started again by its agent, and all ranks resume. A killed machine doesn't come back: the
others plan for those that are left. Every checkpoint is copied when it appears. A manual restart begins in a new
folder with the checkpoint that the run resumed, without adaptation, with the plan and the number of ranks that the
run had then. Both must end with the same weights, bit by bit, and with the same losses after the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__)
STEPS, BATCH, SAVED = 63, 16, 5
_CONF = "is_host=0,last_call_timeout=3,keep_alive_interval=2,keep_alive_max_attempt=5,join_timeout=900,read_timeout=600"


def work(out: Path, plan: Path | None, kinds: str) -> None:
    """What each rank does."""
    import torch
    from paced import replanner, workload

    from bitwright import TrainConfig, Trainer

    torch.set_num_threads(1)
    task = workload(0.003)
    config = TrainConfig(epochs=3, batch=BATCH, lr=0.05, log_steps=1, save_steps=SAVED)
    if plan is not None:
        trainer = Trainer(task, compute=plan, kind=kinds, config=config, out=out, resume=True, device="cpu")
    else:  # times don't matter here, so that the plan only depends on the ranks
        planner = replanner(task, "a", threshold=1e12)
        trainer = Trainer(task, adaptive=planner, config=config, out=out, resume="auto", device="cpu")
    trainer.fit()


@dataclass
class Machines:
    """Agents of torchrun, in sessions of their own."""

    folder: Path
    agents: list[subprocess.Popen[bytes]] = field(default_factory=list)
    store: Any = None

    def start(self, count: int, ranks: int, *options: str) -> None:
        """Start machines with so many ranks each."""
        from torch.distributed import TCPStore

        if self.store is None:
            self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        for number in range(count):
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                f"--nnodes=1:{count}",
                f"--nproc-per-node={ranks}",
            ]
            command += ["--max-restarts=3", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self.store.port}"]
            command += ["--rdzv-id=elastic", "--local-addr=127.0.0.1", f"--rdzv-conf={_CONF}", "--monitor-interval=0.2"]
            with (self.folder / f"machine{len(self.agents)}-{number}.log").open("wb") as log:
                command += [str(HERE), *options]
                agent = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
            self.agents.append(agent)

    def ranks(self, agent: subprocess.Popen[bytes]) -> list[int]:
        """The processes that train."""
        return [pid for pid in _children(agent.pid) if b"--work" in _command(pid)]

    def kill(self, agent: subprocess.Popen[bytes]) -> None:
        """The machine dies."""
        ranks = self.ranks(agent)
        agent.kill()
        for pid in ranks:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.wait()
        self.agents.remove(agent)

    def wait(self, seconds: float) -> list[int]:
        """Wait until all have ended; their codes."""
        until = time.monotonic() + seconds
        return [agent.wait(max(0.1, until - time.monotonic())) for agent in self.agents]

    def close(self) -> None:
        """End everything that is left."""
        for agent in list(self.agents):
            self.kill(agent)
        self.store = None

    def logs(self) -> str:
        """The last lines of all machines."""
        return "\n".join(file.read_text(errors="replace")[-2500:] for file in sorted(self.folder.glob("machine*.log")))


def _children(parent: int) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == parent:
                    found.append(int(folder.name))
    return found


def _command(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def rows(run: Path) -> list[dict[str, Any]]:
    """The history of a run."""
    path = run / "history.jsonl"
    lines = path.read_bytes().splitlines() if path.is_file() else []
    found = []
    for line in lines:
        with suppress(ValueError):
            found.append(json.loads(line))
    return found


class Snapshots(threading.Thread):
    """Copies each checkpoint when it appears. Checkpoints appear as a whole, because they are renamed."""

    def __init__(self, run: Path, folder: Path) -> None:
        super().__init__(daemon=True)
        self.source, self.folder, self.ended = run / "checkpoints", folder, False

    def run(self) -> None:
        """Poll until `ended`."""
        while not self.ended:
            for made in self.source.glob("step-*") if self.source.is_dir() else ():
                if not (self.folder / made.name).exists():
                    partial = self.folder / "partial"
                    shutil.rmtree(partial, ignore_errors=True)
                    with suppress(OSError):
                        shutil.copytree(made, partial)
                        partial.rename(self.folder / made.name)
            time.sleep(0.05)


def killed_run(folder: Path, seed: int, *, machine: bool, seconds: float = 900) -> dict[str, Any]:
    """One run with a kill, and its manual restart; raises if they differ."""
    import torch
    from safetensors.torch import load_file

    chosen = random.Random(seed)
    step, victim = chosen.randint(SAVED + 1, STEPS - 8), chosen.randrange(3)
    run, copies = folder / "run", folder / "copies"
    copies.mkdir(parents=True)
    snapshots = Snapshots(run, copies)
    snapshots.start()
    machines = Machines(folder)
    try:
        machines.start(*((3, 1) if machine else (1, 3)), "--work", str(run))
        until = time.monotonic() + seconds
        while not any(row["step"] >= step for row in rows(run)):
            if time.monotonic() > until or any(agent.poll() is not None for agent in machines.agents):
                raise RuntimeError(f"the run doesn't reach step {step}\n{machines.logs()}")
            time.sleep(0.02)
        if machine:
            machines.kill(machines.agents[victim])
        else:
            os.kill(machines.ranks(machines.agents[0])[victim], signal.SIGKILL)
        codes = machines.wait(seconds)
        if any(codes):
            raise RuntimeError(f"machines ended with {codes}\n{machines.logs()}")
    finally:
        machines.close()
        snapshots.ended = True
        snapshots.join()
    facts = json.loads((run / "result.json").read_text())
    resumed = [found[1] for note in facts["notes"] if (found := re.match(r"resumed (step-\d+)", note))]
    manual = folder / "manual"
    if resumed:  # else the kill came before the first checkpoint, and the run began again
        shutil.copytree(copies / resumed[-1], manual / "checkpoints" / resumed[-1])
    else:
        raise RuntimeError(f"the run wasn't resumed: {facts['notes']}")
    world = facts["processes"]
    alone = Machines(folder)
    try:
        plan = ["--plan", str(run / "plan.yaml"), "--kinds", ",".join(facts["adaptive"]["sections"])]
        alone.start(1, world, "--work", str(manual), *plan)
        if any(alone.wait(seconds)):
            raise RuntimeError(f"the manual restart failed\n{alone.logs()}")
    finally:
        alone.close()
    first, second = (load_file(one / "checkpoint.safetensors") for one in (run, manual))
    begun = int(resumed[-1].removeprefix("step-"))
    losses = [[row["loss"] for row in rows(one) if "loss" in row and row["step"] > begun] for one in (run, manual)]
    return {
        "seed": seed,
        "killed": "machine" if machine else "rank",
        "victim": victim,
        "step": step,
        "resumed": begun,
        "ranks": world,
        "batches": facts["batches"],
        "steps": facts["steps"],
        "loss": losses[0][-1],
        "manual loss": losses[1][-1],
        "same weights": all(torch.equal(first[name], second[name]) for name in first) and first.keys() == second.keys(),
        "same losses": losses[0] == losses[1] and len(losses[0]) == STEPS - begun,
    }


def main() -> None:
    """Run as a script: kill, compare and write the table; or train as a rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--plan", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kinds", default="a", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.work is not None:
        return work(chosen.work, chosen.plan, chosen.kinds)
    found = []
    for seed in range(chosen.first, chosen.first + chosen.kills):
        with tempfile.TemporaryDirectory() as folder:
            found.append(killed_run(Path(folder), seed, machine=seed % 2 == 1))
        sys.stdout.write(json.dumps(found[-1]) + "\n")
        sys.stdout.flush()
    same = sum(row["same weights"] and row["same losses"] for row in found)
    heads = list(found[0])
    lines = [
        "# Killed ranks and machines",
        "",
        f"{same} of {len(found)} runs ended with the weights and losses of a manual restart, bit by bit.",
        "",
        "| " + " | ".join(heads) + " |",
        "|" + "---|" * len(heads),
        *("| " + " | ".join(str(row[head]) for head in heads) + " |" for row in found),
        "",
        f"`{' '.join([HERE.name, *sys.argv[1:]])}`",
    ]
    if chosen.markdown is not None:
        chosen.markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if same < len(found):
        raise SystemExit(f"{len(found) - same} of {len(found)} runs differ")
    return None


if __name__ == "__main__":
    main()
