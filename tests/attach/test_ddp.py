"""DistributedDataParallel over two real processes: learnable scales stay equal."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import torch

WORKER = Path(__file__).with_name("ddp_worker.py")


def test_learnable_scales_are_equal_on_both_ranks(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = [tmp_path / f"{rank}.pt" for rank in (0, 1)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(port), str(result)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, result in enumerate(results)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=90)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
    first, second = (torch.load(result, weights_only=True) for result in results)
    assert len(first["after"]) >= 4
    for site, scale in first["after"].items():
        assert torch.equal(scale, second["after"][site]), site
        assert not torch.equal(scale, first["before"][site]), f"{site} didn't learn"
    for key, value in first["state"].items():
        if "running_" not in key:  # without SyncBatchNorm each rank has its own until the next forward
            assert torch.equal(value, second["state"][key]), key
