"""Which process has which device, and what connects them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from bitwright.training import distributed as ranks


@pytest.mark.parametrize(
    ("said", "backend", "taken"),
    [(None, "nccl", 1), ("cuda", "nccl", 1), ("cuda:0", "nccl", 0), ("cpu", "gloo", None)],
)
def test_each_process_has_a_gpu_of_its_own(
    monkeypatch: pytest.MonkeyPatch, said: str | None, backend: str, taken: int | None
) -> None:
    """nccl sends words by the current GPU, which is the first one in every process until it is said otherwise."""
    asked: dict[str, Any] = {}
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: asked.update(device=torch.device(device)))
    monkeypatch.setattr(ranks, "rendezvous", lambda where: iter([(dist.HashStore(), 1, 2)]))
    monkeypatch.setattr(ranks, "agree_on_attempt", lambda store, rank, world: "0")
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **more: asked.update(backend=backend))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    with ranks.process_group(said):
        pass
    assert asked["backend"] == backend
    assert (asked["device"].index if taken is not None else asked.get("device")) == taken


@pytest.mark.parametrize(
    ("said", "found"), [(None, "cuda:1"), ("cuda", "cuda:1"), ("cuda:0", "cuda:0"), ("cpu", "cpu")]
)
def test_a_gpu_without_a_number_is_the_process_own(
    monkeypatch: pytest.MonkeyPatch, said: str | None, found: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert ranks.device_of(said, 1) == torch.device(found)
