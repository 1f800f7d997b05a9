"""Several instances at a time are real processes, each on cores of its own."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from problems import raises_problem
from torch import nn

import bitwright as bw
from bitwright.bench.comparison import Comparison
from bitwright.bench.instances import Job, _started, arrange, can_pin, run_together
from bitwright.core.errors import BitwrightError

pinning = pytest.mark.skipif(not can_pin(), reason="this system doesn't bind processes to cores")
two_cores = pytest.mark.skipif(
    not can_pin() or len(os.sched_getaffinity(0)) < 2, reason="this process has fewer than two cores"
)


@pytest.mark.slow
@two_cores
def test_two_instances_on_cores_of_their_own_are_added_up() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 16)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    work = bw.Workload(name="tiny", model=model, inputs=(x[:1],), calibration=lambda: [x])
    free, phases = sorted(os.sched_getaffinity(0)), list[str]()
    result = bw.benchmark(
        work,
        ["onnxruntime"],
        batch_sizes=(4,),
        runs=23,
        warmup=1,
        instances=2,
        cores=1,
        progress=lambda done, total, description: phases.append(description),
    )
    assert sorted(os.sched_getaffinity(0)) == free  # ours are as they were
    assert [(row.variant, row.batch, row.runs, row.pinned) for row in result.together] == [
        ("float", 4, 23, True),
        ("quantized", 4, 23, True),
    ]
    for row in result.together:
        assert [one.cores for one in row.instances] == [(free[0],), (free[1],)]  # as the processes saw them
        for one in (row, *row.instances):
            assert 0 < one.median_ms <= one.p90_ms <= one.p99_ms
        # A round lasts until its last instance is done, however late that one began: never more than the sum.
        assert 0 < row.throughput <= sum(one.throughput for one in row.instances)
    plain, fast = result.together
    assert (plain.ratio, fast.ratio) == (1.0, pytest.approx(fast.throughput / plain.throughput))
    (pick,) = result.fastest
    assert pick.throughput == max(plain.throughput, fast.throughput)
    assert result.runtimes[0].timings == ()
    assert Comparison.model_validate_json(result.model_dump_json()) == result
    assert "timing onnxruntime: 23 of 23" in phases


def test_an_instance_has_as_many_threads_as_cores() -> None:
    work = bw.Workload(name="tiny", model=nn.Linear(2, 2), inputs=(torch.ones(1, 2),))
    with pytest.raises(BitwrightError) as caught:
        bw.benchmark(work, ["onnxruntime"], instances=1, threads=2)
    assert caught.value.codes == ["contradicting-arguments"]


@pinning
def test_missing_numbers_follow_from_the_cores() -> None:
    free = sorted(os.sched_getaffinity(0))
    assert arrange(1, None) == [tuple(free)]
    assert arrange(None, 1) == [(core,) for core in free]
    with raises_problem("too-few-cores", mentions=f"{len(free) + 1} × 1"):
        arrange(len(free) + 1, 1)


def test_a_failed_instance_raises_its_error(tmp_path: Path) -> None:
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"nothing")
    lost = Job(variant="float", batch=2, artefact=broken, feed={"x": np.zeros((2, 2))})
    with raises_problem("instance-failed", mentions="not an ONNX file"):
        run_together("onnxruntime", [lost], arrange(1, 1), runs=1, warmup=0)


def test_a_killed_instance_is_an_error_and_all_others_end() -> None:
    with _started([arrange(1, 1)[0]] * 2) as (one, other):
        one.process.kill()
        with raises_problem("instance-failed", mentions=-9):
            one.hear()
    assert other.process.poll() is not None
