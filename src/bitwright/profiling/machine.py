"""This machine: its name, memory and CPU quota, and the file of its samples."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import os
import platform
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from bitwright.profiling.step import Clock
from bitwright.version import __version__


def device_name() -> str:
    """What to call this device: the processor, since steps are measured there, whatever else the machine has."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"{model}, {torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}"


def circumstances(clock: Clock) -> dict[str, Any]:
    """What samples depend on beside the operators: others aren't mixed with them."""
    return {
        "device": device_name(),
        "clock": clock,
        "threads": torch.get_num_threads(),
        "quota": cpu_quota(),
        "torch": torch.__version__,
        "bitwright": __version__,
    }


def samples_file(clock: Clock) -> Path:
    """The file of this device's samples, for all models and all profiles that are made of them.

    In `BITWRIGHT_CACHE`, else in the user's cache folder.
    """
    about = circumstances(clock)
    named = os.environ.get("BITWRIGHT_CACHE")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bitwright"
    words = re.sub(r"[^A-Za-z0-9.]+", "-", about["device"]).strip("-").lower()
    number = hashlib.sha256(repr(sorted(about.items())).encode()).hexdigest()[:8]
    return (Path(named) if named else home) / "samples" / f"{words}-{clock}-{number}.jsonl"


def of_rank(path: Path, rank: int) -> Path:
    """A file for each process of a group: rank 0 has the name that was given.

    >>> str(of_rank(Path("here.json"), 0)), str(of_rank(Path("here.json"), 1))
    ('here.json', 'here.rank1.json')
    """
    return path if rank == 0 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def cpu_quota() -> float | None:
    """How many cores this process may use at most (a container's, say); None if nobody limits it."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    mounted = Path("/sys/fs/cgroup")
    for line in lines:
        _, controllers, group = line.split(":", 2)
        try:
            if "cpu" in controllers.split(","):
                folder = mounted / "cpu" / group.lstrip("/")
                quota = (folder / "cpu.cfs_quota_us").read_text(encoding="ascii")
                period = (folder / "cpu.cfs_period_us").read_text(encoding="ascii")
            elif controllers == "":
                quota, period = (mounted / group.lstrip("/") / "cpu.max").read_text(encoding="ascii").split()
            else:
                continue
            if float(quota) > 0:
                return float(quota) / float(period)
        except (OSError, ValueError):  # no such file, or `max`
            continue
    return None


def pauses(clock: Clock) -> bool:
    """Whether this clock goes on while the process stands still, its share of the CPU being used up."""
    quota = cpu_quota()
    return clock == "wall" and quota is not None and quota < torch.get_num_threads()


def resident_bytes() -> int:
    """Resident bytes of this process; 0 if unknown."""
    return _status("VmRSS")


def peak_resident_bytes() -> int:
    """Peak resident bytes of this process; 0 if unknown."""
    return _status("VmHWM")


def reset_peak_memory() -> bool:
    """Release free memory and reset the peak counter of this process; return False if that is impossible.

    Free blocks of the heap would count as part of the next measurement, and larger earlier steps would hide it.
    """
    gc.collect()
    with suppress(AttributeError, OSError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return peak_resident_bytes() > 0


def _status(name: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
    except (OSError, ValueError, StopIteration):
        return 0


def memory_limit() -> int | None:
    """Bytes that this machine has."""
    try:
        return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (ValueError, OSError):
        return None
