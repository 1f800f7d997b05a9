"""A DDP may outlive its process group."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bitwright.training import distributed as groups
from bitwright.training.distributed import joined_group, keep_group, keep_groups, leave_group

WORKER = Path(__file__).parents[1] / "support" / "process_group_worker.py"


@pytest.mark.parametrize("leave", ["leave_group", "keep_group"])
def test_a_ddp_that_outlives_its_group_does_not_deadlock(leave: str, tmp_path: Path) -> None:
    """Without these functions rank 0 hangs forever."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), f"file://{tmp_path}/meeting", leave],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    assert len(ranks) == 2
    try:
        for rank, process in enumerate(ranks):
            words, errors = process.communicate(timeout=90)
            assert process.returncode == 0, errors
            assert words.splitlines() == [f"rank {rank} left"] * 2
    finally:
        for process in ranks:
            process.kill()
            process.communicate(timeout=60)


def _ddp(model: nn.Module | None = None) -> Any:
    net = DistributedDataParallel(model or nn.Linear(4, 4))
    net(torch.ones(2, 4)).sum().backward()
    return net


def test_a_group_is_released_after_its_reducer(tmp_path: Path) -> None:
    for number in range(3):  # torch keeps the first group of a process
        with joined_group("gloo", init_method=f"file://{tmp_path}/{number}", rank=0, world_size=1):
            net = _ddp()
            group = weakref.ref(net.process_group)
        assert not dist.is_initialized()
        reducer = net.reducer
        del net
        gc.collect()
        assert groups._KEPT[reducer] is group()
        del reducer
        assert len(groups._KEPT) == 0
    assert group() is None


def test_every_ddp_of_the_process_is_found(tmp_path: Path) -> None:
    """Other frameworks make theirs where we don't see it, and collect garbage when they like."""
    with joined_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1):
        net = _ddp()
        held = {"cycle": _ddp()}
        held["self"] = held
        keep_groups()
        assert {id(part) for part in groups._KEPT} == {
            id(part) for one in (net, held["cycle"]) for part in (one.reducer, one.logger)
        }
        keep_group(net)  # again
        assert len(groups._KEPT) == 4
    del net, held
    gc.collect()
    assert len(groups._KEPT) == 0


def test_leaving_without_a_group_is_allowed(tmp_path: Path) -> None:
    keep_groups()
    leave_group()
    with joined_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1):
        dist.destroy_process_group()  # user code may be first
    assert not dist.is_initialized()
