"""How much memory an artefact takes: measured in a process of its own, which does nothing else."""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.deploy.runtime import open_runtime
from bitwright.errors import ArtefactError

_SECONDS = 600


def peak_memory(runtime: str, path: Path, feed: Mapping[str, NDArray[Any]], *, threads: int = 1) -> int:
    """Bytes by which the peak of a process grows when it loads the artefact and runs it on `feed`."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        inputs = Path(folder) / "feed.npz"
        np.savez(inputs, **feed)  # type: ignore[arg-type]
        command = [sys.executable, "-m", "bitwright.deploy.footprint", runtime, str(path), str(inputs), str(threads)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ArtefactError(f"its memory can't be measured: {lines[-1]}", where=str(path), fix="leave memory out")
    return int(done.stdout)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(runtime: str, path: str, inputs: str, threads: str) -> int:
    """Load, run three times, and see what that took beyond a process that has everything imported."""
    with np.load(inputs) as stored:
        feed = {name: stored[name] for name in stored.files}
    before = _peak()
    session = open_runtime(runtime, path, threads=int(threads))
    for _ in range(3):
        session.run(feed)
    return _peak() - before


if __name__ == "__main__":
    sys.stdout.write(f"{main(*sys.argv[1:])}\n")
