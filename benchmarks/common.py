"""What benchmarks share: the environment written beside the numbers, where results go, processes with limits."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import numpy
import torch

import bitwright
from bitwright.core.files import write_text

RESULTS = Path(__file__).parent / "results"
_PATIENCE = 10  # seconds that processes have to end by themselves: torchrun ends its workers then


def _without_folder(argument: str) -> str:
    """An absolute path as its last part: results name no folders of the machine that made them."""
    path = Path(argument)
    return path.name if path.is_absolute() else argument


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
        **{name: os.environ[name] for name in ("ONEDNN_MAX_CPU_ISA",) if name in os.environ},
        "threads": torch.get_num_threads(),
        "seed": torch.initial_seed(),
        "command": " ".join(_without_folder(part) for part in command),
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


class _Asked:
    """A signal that came while something was begun."""

    depth = 0
    number: int | None = None


def _asked(number: int, _: FrameType | None) -> None:
    _Asked.number = number
    _end_if_asked()


def _end_if_asked() -> None:
    if _Asked.number is not None and _Asked.depth == 0:
        sys.exit(128 + _Asked.number)


def clean_up_on_signals() -> None:
    """SIGTERM and Ctrl-C end this process as an error does: what `with` has begun is undone, `Ranks` among it."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _asked)


@contextmanager
def whole() -> Iterator[None]:
    """What is begun in here is finished before a signal counts: half of it would be left behind."""
    _Asked.depth += 1
    try:
        yield
    finally:
        _Asked.depth -= 1
        _end_if_asked()


class Ranks:
    """Processes with limits that end with this one. Each has a session of its own: what it starts ends with it."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.groups: list[Path] = []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        with whole():
            for number in (signal.SIGTERM, signal.SIGKILL):
                for process in self.processes:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, number)
                until = time.monotonic() + _PATIENCE
                for process in self.processes:
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(max(0.0, until - time.monotonic()))
            _freed(self.groups)

    def start(self, command: list[str], *, core: int | None = None, **more: str) -> subprocess.Popen[bytes]:
        """Start a process with one thread, on this core; `more` are variables of its environment."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **more}
        with whole():
            process = subprocess.Popen(command, env=environment, start_new_session=True)
            self.processes.append(process)
        if core is not None:
            os.sched_setaffinity(process.pid, {core})
        return process

    def limit(
        self, process: subprocess.Popen[bytes], *, cores: float, memory_gb: float | None = None, period: int = 10_000
    ) -> list[Path]:
        """Give a process a part of a core, and little memory, by cgroups (v1, as root); the groups that it got.

        `period` is that of the quota, in microseconds.
        """
        wanted = {"cpu": {"cpu.cfs_period_us": period, "cpu.cfs_quota_us": int(period * cores)}}
        if memory_gb is not None:
            wanted["memory"] = {"memory.limit_in_bytes": int(memory_gb * 1e9)}
        made = []
        for controller, values in wanted.items():
            group = Path("/sys/fs/cgroup") / controller / f"bitwright-{process.pid}"
            with suppress(OSError):
                with whole():
                    group.mkdir()
                    self.groups.append(group)
                for name, value in values.items():
                    (group / name).write_text(str(value), encoding="ascii")
                (group / "cgroup.procs").write_text(str(process.pid), encoding="ascii")
                made.append(group)
        return made

    def wait(self, seconds: float) -> list[int | None]:
        """Until all have ended, or one has failed, or it takes too long; the codes that they ended with."""
        until = time.monotonic() + seconds
        codes = [process.poll() for process in self.processes]
        while None in codes and not any(codes) and time.monotonic() < until:
            time.sleep(0.1)
            codes = [process.poll() for process in self.processes]
        return codes


def _freed(groups: list[Path]) -> None:
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
