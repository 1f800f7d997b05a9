"""What benchmarks share: the environment that is written beside the numbers, where results go, limits of a process."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import numpy
import torch

import bitwright
from bitwright.files import write_text

RESULTS = Path(__file__).parent / "results"


def environment(**more: Any) -> dict[str, Any]:
    """Versions, machine, seed, and a hash of the command that was really run."""
    command = [Path(sys.argv[0]).name, *sys.argv[1:]]
    return {
        "bitwright": bitwright.__version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "vnni": _has_vnni(),
        "threads": torch.get_num_threads(),
        "seed": torch.initial_seed(),
        "command": " ".join(command),
        "config_hash": hashlib.sha256(json.dumps([command, more], sort_keys=True).encode()).hexdigest()[:16],
        **more,
    }


def _has_vnni() -> bool | None:
    """Whether this CPU multiplies 8-bit codes in one instruction, which decides what INT8 is worth; None: unknown."""
    try:
        return "_vnni" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return None


def save(name: str, data: dict[str, Any], markdown: str) -> None:
    """Print the table and keep it as JSON and Markdown under results/."""
    facts = ", ".join(f"{key} {value}" for key, value in data["environment"].items())
    text = f"{markdown}\n\n{facts}\n"
    write_text(RESULTS / f"{name}.json", json.dumps(data, indent=1, sort_keys=True) + "\n")
    write_text(RESULTS / f"{name}.md", text)
    sys.stdout.write(text)


def limited(pid: int, *, cores: float, memory_gb: float | None = None) -> list[Path]:
    """Give a process a part of a core, and little memory, by cgroups (v1, as root); the groups that could be made."""
    wanted = {"cpu": {"cpu.cfs_period_us": 10_000, "cpu.cfs_quota_us": int(10_000 * cores)}}
    if memory_gb is not None:
        wanted["memory"] = {"memory.limit_in_bytes": int(memory_gb * 1e9)}
    made = []
    for controller, values in wanted.items():
        group = Path("/sys/fs/cgroup") / controller / f"bitwright-{pid}"
        try:
            group.mkdir()
            for name, value in values.items():
                (group / name).write_text(str(value), encoding="ascii")
            (group / "cgroup.procs").write_text(str(pid), encoding="ascii")
            made.append(group)
        except OSError:
            continue
    return made


def freed(groups: list[Path]) -> None:
    """Remove groups whose processes have ended: the system takes a moment to notice."""
    until = time.monotonic() + 5
    for group in groups:
        while True:
            try:
                group.rmdir()
                break
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)
