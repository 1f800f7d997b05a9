"""DistributedDataParallel over two real processes: learnable scales stay equal."""

from __future__ import annotations

from pathlib import Path

import torch
import two_ranks


def test_learnable_scales_are_equal_on_both_ranks(tmp_path: Path) -> None:
    first, second = two_ranks.run(Path(__file__).with_name("ddp_worker.py"), tmp_path)
    assert len(first["after"]) >= 4
    for site, scale in first["after"].items():
        assert torch.equal(scale, second["after"][site]), site
        assert not torch.equal(scale, first["before"][site]), f"{site} didn't learn"
    for key, value in first["state"].items():
        if "running_" not in key:  # without SyncBatchNorm each rank has its own until the next forward
            assert torch.equal(value, second["state"][key]), key
