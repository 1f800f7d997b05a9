from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from step_cases import profile_of

from bitwright.profiling import DeviceProfile, SampleStore
from bitwright.profiling.device_profile import CastCost, Line, poor_fits

WORDS = ["profile", "digits-untrained", "--batch", "8", "--no-casts"]


def test_ignored_options_are_rejected_together(run: Any, tmp_path: Path) -> None:
    ran = run(*WORDS, "--trace", tmp_path / "t.json", "--amp", "bf16", "--precision", "int8", "--half-batch")
    assert ran.code == 2
    for flag in ("--amp", "--precision", "--half-batch", "--no-casts"):
        assert flag in ran.err
    ran = run("profile", "digits-untrained", "--published", "nvidia-t4", "--rounds", "5", "--clock", "cpu")
    assert ran.code == 2
    assert "--rounds, --clock" in ran.err


def test_a_damaged_cache_is_rejected(run: Any, tmp_path: Path) -> None:
    cache = tmp_path / "samples.jsonl"
    cache.write_text("[]\n")
    ran = run(*WORDS, "--cache", cache, "-o", tmp_path / "d.json")
    assert ran.code == 2
    assert [(problem.code, problem.where) for problem in ran.problems] == [("damaged-samples", f"{cache}, line 1")]


NETS = """
import torch
from bitwright import Workload

def net(width):
    data = torch.randn(16, width)
    model = torch.nn.Sequential(torch.nn.Linear(width, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    samples = torch.utils.data.TensorDataset(data, data[:, :1])
    loss = torch.nn.functional.mse_loss
    return Workload(name="net", model=model, inputs=(data[:1],), training=lambda: samples, loss=loss)

def narrow():
    return net(3)

def wide():
    return net(300)
"""


@pytest.mark.slow
def test_operators_of_other_models_in_the_cache_are_not_shown(run: Any, tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(NETS)
    options = ["--batch", "8", "--no-casts", "--rounds", "3", "--kernel", "int8", "--cache", tmp_path / "samples.jsonl"]
    assert "300]" in run("profile", f"{tmp_path}/nets.py:wide", *options, "-o", tmp_path / "wide.json").out
    ran = run("profile", f"{tmp_path}/nets.py:narrow", *options, "-o", tmp_path / "narrow.json")
    assert ran.code == 0, ran.err
    assert "linear(input=f32[8,3], weight=f32[4,3]+" in ran.out
    assert "kernel int8" in ran.out
    assert "300]" not in ran.out


def test_lines_that_fit_badly_are_named() -> None:
    good, bad = (Line(per_element=1.0, fixed=0.0, r2=r2, held_out=0.1) for r2 in (0.99, 0.5))
    off = Line(per_element=1.0, fixed=0.0, r2=0.99, held_out=0.6)
    made = profile_of([]).model_copy(
        update={"casts": [CastCost(kind="a", forward=[good, bad]), CastCost(kind="b", forward=[good], backward=[off])]}
    )
    assert [line.partition(" (")[0] for line in poor_fits(made)] == ["a forward", "b backward"]


def test_an_interrupted_run_says_what_is_kept(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, store: SampleStore, **__: Any) -> None:
        for _ in range(7):
            store.add({"round": [["add(x)", "float32", 1.0, 2.0]]})
        raise KeyboardInterrupt

    monkeypatch.setattr("bitwright.cluster.measurement.profile_variants", interrupted)
    cache = tmp_path / "samples.jsonl"
    ran = run(*WORDS, "-o", tmp_path / "d.json", "--cache", cache)
    assert ran.code == 130
    assert f"7 rounds are saved in {cache}" in ran.err
    assert "nothing was written" not in ran.err
    assert not (tmp_path / "d.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_ranks_measure_their_collectives(tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
        *("--nproc-per-node", "2", "-m", "bitwright", *WORDS, "--rounds", "3", "-o", "here.json"),
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "BITWRIGHT_CACHE": str(tmp_path / "cache"),
    }
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=350, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "each rank has its own profile: here.json, here.rank1.json" in done.stdout
    for name in ("here.json", "here.rank1.json"):
        made = DeviceProfile.load(tmp_path / name)
        assert {(cost.operation, cost.backend, cost.world) for cost in made.collectives} == {
            ("all_reduce", "gloo", 2),
            ("broadcast", "gloo", 2),
        }
        assert made.host.ddp_forward >= 0
    assert len(list((tmp_path / "cache" / "samples").iterdir())) == 2  # nobody writes into another's file
