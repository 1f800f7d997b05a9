from __future__ import annotations

import pytest
import torch

from bitwright.workload import batches, evaluate
from bitwright.zoo.workloads import digits, digits_split, train_digits


def test_split_is_fixed_and_disjoint() -> None:
    split = digits_split()
    assert split.train_images.shape == (1297, 1, 8, 8)
    assert split.test_images.shape == (500, 1, 8, 8)
    assert torch.equal(split.test_labels, digits_split().test_labels)
    assert not torch.equal(split.test_labels, digits_split(seed=1).test_labels)
    assert float(split.train_images.min()) == -1.0
    assert float(split.train_images.max()) == 1.0


def test_training_is_seeded_and_leaves_the_callers_state() -> None:
    torch.manual_seed(5)
    expected, threads = torch.rand(1), torch.get_num_threads()
    torch.manual_seed(5)
    told: list[tuple[int, int]] = []
    first = train_digits(seed=3, epochs=1, on_epoch=lambda done, epochs, loss: told.append((done, epochs)))
    assert torch.equal(torch.rand(1), expected)
    assert torch.get_num_threads() == threads
    assert told == [(1, 1)]
    second = train_digits(seed=3, epochs=1)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.timeout(300)  # seconds of work, but test machines are shared
def test_workload_reaches_98_percent() -> None:
    workload = digits()
    assert evaluate(workload, workload.model)["top1"] >= 98.0
    assert sum(len(batch) for batch in batches(workload.calibration)) == 256
