"""The memory of an artefact, measured in a separate process."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.core.errors import ArtefactError
from bitwright.core.files import scratch_folder
from bitwright.deployment.runtimes.base import open_runtime

_SECONDS = 600


def peak_memory(runtime: str, path: Path, feed: Mapping[str, NDArray[Any]], *, threads: int = 1) -> int:
    """The growth of a process's peak memory, in bytes, when it loads the artefact and runs it on `feed`."""
    with scratch_folder() as folder:
        inputs = folder / "feed.npz"
        np.savez(inputs, **feed)  # type: ignore[arg-type]
        command = [
            sys.executable,
            "-m",
            "bitwright.deployment.footprint",
            runtime,
            str(path),
            str(inputs),
            str(threads),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        what = f"can't measure the memory: {lines[-1]}"
        raise ArtefactError(what, where=str(path), fix="omit memory from the goal", code="memory-not-measured")
    return int(done.stdout)


def _now() -> int:
    """The resident memory, after a reset of the peak; on systems without /proc, the peak so far."""
    status = Path("/proc/self/status")
    if not status.exists():
        return _peak()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _line(status, "VmRSS:")


def _peak() -> int:
    status = Path("/proc/self/status")
    if status.exists():
        return _line(status, "VmHWM:")
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _line(status: Path, name: str) -> int:
    return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith(name))


def main(runtime: str, path: str, inputs: str, threads: str) -> int:
    """Load the artefact, run it three times, and return the additional memory."""
    with np.load(inputs) as stored:
        feed = {name: stored[name] for name in stored.files}
    before = _now()
    session = open_runtime(runtime, path, threads=int(threads))
    for _ in range(3):
        session.run(feed)
    return max(0, _peak() - before)


if __name__ == "__main__":
    sys.stdout.write(f"{main(*sys.argv[1:])}\n")
