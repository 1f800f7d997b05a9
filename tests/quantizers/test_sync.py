"""Folding with the statistics of all processes: two ranks train as one process does on the joint batch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import two_ranks
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from sync_worker import CASES, SHARES, build, train


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each of two real processes ended with."""
    return two_ranks.run(Path(__file__).with_name("sync_worker.py"), tmp_path_factory.mktemp("sync"))


@pytest.mark.parametrize(("strategy", "norm", "rounding"), CASES)
def test_two_ranks_are_one_process_on_the_joint_batch(
    strategy: int, norm: str, rounding: bool, ranks: list[Any]
) -> None:
    torch.set_num_threads(1)
    model, x, weights = build(strategy, norm, rounding)
    joint = train(model, model.train(), x, weights)
    first, second = (rank[f"{strategy} {norm} {rounding}"] for rank in ranks)
    compare(first, second, joint, 1e-5 if rounding else 1e-10)  # quantizers compute in float32
    assert first["1.num_batches_tracked"] == (0 if strategy < 2 else 2)


@pytest.mark.parametrize("strategy", [2, 3, 4])
def test_compiled_quantizers_in_a_subgroup(strategy: int, ranks: list[Any]) -> None:
    torch.set_num_threads(1)
    model, x, weights = build(strategy, "SyncBatchNorm", False)
    joint = train(model, model.train(), x, weights)
    compare(*(rank[f"{strategy} compiled"] for rank in ranks), joint, 1e-10)


def compare(first: dict[str, Tensor], second: dict[str, Tensor], joint: dict[str, Tensor], tolerance: float) -> None:
    """Both ranks' outputs are the joint ones; all else is equal on both, and the joint one."""
    assert len(set(SHARES)) == 2
    out = torch.cat([first["out"], second["out"]])
    assert torch.allclose(out, joint["out"], rtol=tolerance, atol=tolerance)
    for name in joint.keys() - {"out"}:
        assert torch.equal(first[name], second[name]), name
        assert torch.allclose(first[name], joint[name], rtol=tolerance, atol=tolerance), name
