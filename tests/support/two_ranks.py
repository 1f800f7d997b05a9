"""Two real processes that talk over gloo: how tests start them, and how they find each other."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from bitwright.training.distributed import joined_group


def run(worker: Path, folder: Path, *, seconds: float = 90) -> list[Any]:
    """Run a worker script as rank 0 and 1; what each of them gave back."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = [folder / f"{rank}.pt" for rank in (0, 1)]
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    processes = [
        subprocess.Popen(
            [sys.executable, str(worker), str(rank), str(port), str(result)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, result in enumerate(results)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=seconds)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return [torch.load(result, weights_only=True) for result in results]


def work(main: Callable[[int], Any]) -> None:
    """The frame of a worker script: `main(rank)` gives what `run` returns."""
    rank, port, result = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    with joined_group("gloo", init_method=address, rank=rank, world_size=2, timeout=timedelta(seconds=60)):
        torch.save(main(rank), result)
